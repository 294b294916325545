"""The structured-output fields become one grammar, or an error that names field and fault."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async import structured
from megallm.core_async.structured import grammar_of

SCHEMA = '{"type": "object", "properties": {"b": {}, "a": {}}}'


def grammar(**fields: object) -> dict[str, Any]:
    """Gives the one grammar that some fields become."""
    (made,) = json.loads(grammar_of(SimpleNamespace(**fields)))["grammars"]
    return made


def nested(depth: int) -> dict[str, Any]:
    """Gives a schema of `depth` objects inside each other."""
    schema: dict[str, Any] = {}
    for _ in range(depth // 2):
        schema = {"properties": {"a": schema}}
    return schema


def test_no_field_is_no_grammar() -> None:
    """Most requests have none, and megatron-core's own parameters lack the fields."""
    assert grammar_of(SimpleNamespace()) == ""
    assert grammar_of(SimpleNamespace(json_schema=None, regex=None, choice=None, grammar=None)) == ""


def test_two_fields_at_once_are_refused() -> None:
    """The caller expects both to hold, and only one could."""
    with pytest.raises(ValueError, match="json_schema and choice are given"):
        grammar(json_schema={}, choice=["a"])


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not among what megallm always brings along."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"megallm\[structured\]"):
        grammar(choice=["a"])
    assert grammar_of(SimpleNamespace()) == "", "who asks for nothing needs nothing"


@pytest.mark.parametrize(
    "given",
    [
        json.loads(SCHEMA),
        SCHEMA,
        SimpleNamespace(model_json_schema=lambda: json.loads(SCHEMA)),
    ],
    ids=["dict", "text", "pydantic"],
)
def test_a_schema_comes_as_dict_as_text_or_as_a_model(given: object) -> None:
    """Libraries differ in what they carry; the order of properties is the order of the output."""
    schema = grammar(json_schema=given)["json_schema"]
    assert schema["type"] == "object"
    assert list(schema["properties"]) == ["b", "a"]


def test_true_is_any_json() -> None:
    """A schema may be a boolean."""
    assert list(grammar(json_schema=True)["json_schema"]) == ["x-guidance"]


def test_whitespace_in_json_is_bounded_unless_the_schema_says_otherwise() -> None:
    """A small model would fill its budget with it."""
    given = {"x-guidance": {"whitespace_flexible": False}}
    assert "32" in grammar(json_schema={})["json_schema"]["x-guidance"]["whitespace_pattern"]
    options = grammar(json_schema=given)["json_schema"]["x-guidance"]
    assert options["whitespace_flexible"] is False
    assert given == {"x-guidance": {"whitespace_flexible": False}}, "the caller's object stays as it was"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (3, "json_schema is a int"),
        ("{", "json_schema is no JSON"),
        ("[1]", "json_schema is a JSON list"),
        (False, "json_schema allows nothing"),
        ({"default": {1, 2}}, "json_schema holds what JSON can't"),
        ({"minimum": float("nan")}, "not JSON compliant"),
        ({"title": "\ud800"}, "half a surrogate pair"),
        ({"enum": ["x" * 70_000]}, "json_schema has 70,0.. bytes, the limit is 65,536"),
        (nested(102), "json_schema is nested more than 100 deep"),
        ("[" * 60_000, "json_schema is nested more than 100 deep"),
        ({"properties": {str(number): {} for number in range(1001)}}, "object of 1,001 properties"),
        ({"multipleOf": 10_007}, "multipleOf of 10,007"),
        ({"multipleOf": 1.23456}, "multipleOf of 123,456"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 109}]}, "multipleOf of 10,573"),
        ({"allOf": [{"pattern": str(number)} for number in range(9)]}, "9 patterns and formats at once"),
    ],
)
def test_a_schema_that_can_not_be_used_is_refused(given: object, fault: str) -> None:
    """Each of them would fail later, with less of a reason, or keep a core busy for minutes."""
    with pytest.raises((TypeError, ValueError), match=fault):
        grammar(json_schema=given)


def test_patterns_count_together_only_where_they_must_hold_together() -> None:
    """A large schema has many, one a property, and that costs nothing."""
    apart = {"properties": {str(number): {"pattern": str(number)} for number in range(100)}}
    either = {"anyOf": [{"pattern": str(number)} for number in range(100)]}
    assert grammar(json_schema=apart)
    assert grammar(json_schema=either)


def test_patterns_count_through_references() -> None:
    """A chain of references stacks them as well as a list does."""
    links = {str(link): {"pattern": str(link), "$ref": f"#/$defs/{link + 1}"} for link in range(9)}
    with pytest.raises(ValueError, match="9 patterns"):
        grammar(json_schema={"$ref": "#/$defs/0", "$defs": links | {"9": {}}})
    doubled = {str(link): {"allOf": [{"$ref": f"#/$defs/{link + 1}"}] * 2} for link in range(60)}
    assert grammar(json_schema={"$ref": "#/$defs/0", "$defs": doubled | {"60": {}}}), "2**60 ways to the end"


@pytest.mark.parametrize("target", ["#", "#/$defs/loop", "#/missing", "#/allOf/7", "elsewhere#/x"])
def test_a_reference_to_itself_or_to_nothing_is_left_to_llguidance(target: str) -> None:
    """A tree refers to itself; what is wrong with the others, llguidance says best."""
    schema: dict[str, Any] = {
        "$ref": target,
        "allOf": [{}],
        "$defs": {"loop": {"allOf": [{"$ref": "#/$defs/loop"}]}},
    }
    assert grammar(json_schema=schema)["json_schema"]["$ref"] == target


def test_a_chain_of_references_has_a_limit() -> None:
    """It would end in a RecursionError that names nothing of the schema."""
    links = {str(link): {"$ref": f"#/$defs/{link + 1}"} for link in range(1500)}
    with pytest.raises(ValueError, match=r"json_schema has too long a chain of \$ref"):
        grammar(json_schema={"$ref": "#/$defs/0", "$defs": links})


def test_a_power_of_ten_is_cheap_as_a_multiple() -> None:
    """Cents and millions are what people ask for."""
    for multiple in (0.01, 1e-6, 0.25, 1_000_000):
        assert grammar(json_schema={"type": "number", "multipleOf": multiple})


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ([], "choice is an empty list"),
        ("abc", "choice is a str"),
        (["a", 3], "choice holds a int, 3"),
        (["a", "\ud800"], "half a surrogate pair"),
        (["x" * 40_000, "y" * 40_000], "choice has 80,001 bytes"),
    ],
)
def test_choices_that_can_not_be_used_are_refused(given: object, fault: str) -> None:
    """A string is a list of letters to Python, and not to its author."""
    with pytest.raises((TypeError, ValueError), match=fault):
        grammar(choice=given)


@given(st.text())
def test_a_choice_is_one_line_without_a_character_that_means_something(text: str) -> None:
    """It is written into an expression between slashes."""
    escaped = structured._escaped(text)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    assert all(character.isalnum() or character in "_ \\{}" for character in escaped)


@pytest.mark.parametrize(
    ("field", "given", "fault"),
    [
        ("regex", 3, "regex is a int"),
        ("regex", "a" * 70_000, "regex has 70,000 bytes"),
        ("grammar", b"start: x", "grammar is a bytes"),
        ("grammar", " \n", "grammar is empty"),
        ("grammar", "root ::= missing", "Rule 'missing' not found"),
        ("grammar", "root ::= " + "(" * 5_000, "grammar: Failed to convert"),
        ("grammar", "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(500)), "501 rules"),
        ("grammar", 'start: %json {"multipleOf": 10007}', "grammar has a multipleOf"),
        ("grammar", "start: %json " + "[" * 60_000, "grammar is nested more than 100 deep"),
    ],
)
def test_an_expression_or_grammar_that_can_not_be_used_is_refused(
    field: str, given: object, fault: str
) -> None:
    """Size and rules are what the time to compile depends on."""
    with pytest.raises((TypeError, ValueError), match=fault):
        grammar(**{field: given})


def test_a_grammar_is_lark_or_gbnf() -> None:
    """Both are written for other engines."""
    assert grammar(grammar='start: "a" | "b"')["lark_grammar"] == 'start: "a" | "b"'
    assert "start:" in grammar(grammar='root ::= "a" | "b"')["lark_grammar"]
    assert grammar(grammar='start: "%json" x\nx: %json {"type": "null"}'), "not every %json is one"


def test_a_long_message_is_cut_to_its_point() -> None:
    """The library quotes the expression, and points at the fault on lines of their own."""
    quoted = "at 1(8): regex parse error:\n    (\n    ^\nerror: unclosed group\n<non-verbose/>"
    assert structured.shortened(quoted) == "unclosed group"
    assert structured.shortened("at 12(3): " + "x" * 500) == "x" * structured.MAX_MESSAGE + "..."
    assert structured.shortened("") == ""
