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


def grammar(**fields: object) -> str:
    """Gives the Lark grammar that some fields become."""
    (made,) = json.loads(grammar_of(SimpleNamespace(**fields)))["grammars"]
    assert made["name"] in fields
    return made["lark_grammar"].removesuffix(structured.NO_FORCING)


def schema_of(**fields: object) -> dict[str, Any]:
    """Gives the JSON schema in the grammar that some fields become."""
    return json.loads(grammar(**fields).removeprefix("start: %json "))


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
    schema = schema_of(json_schema=given)
    assert schema["type"] == "object"
    assert list(schema["properties"]) == ["b", "a"]


def test_true_is_any_json() -> None:
    """A schema may be a boolean."""
    assert list(schema_of(json_schema=True)) == ["x-guidance"]


def test_whitespace_in_json_is_bounded_unless_the_schema_says_otherwise() -> None:
    """A small model would fill its budget with it."""
    given = {"x-guidance": {"whitespace_flexible": False}}
    assert "32" in schema_of(json_schema={})["x-guidance"]["whitespace_pattern"]
    options = schema_of(json_schema=given)["x-guidance"]
    assert options["whitespace_flexible"] is False
    assert given == {"x-guidance": {"whitespace_flexible": False}}, "the caller's object stays as it was"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (3, "json_schema is a int"),
        ("{", "json_schema is no JSON"),
        ("{} {}", "json_schema is no JSON: there is more behind it, at character 2"),
        ('{"minimum": 1e999}', "json_schema is no JSON"),
        ("[1]", "json_schema is a JSON list"),
        (False, "json_schema allows nothing"),
        ({"default": {1, 2}}, "json_schema holds what JSON can't"),
        ({"minimum": float("nan")}, "json_schema holds what JSON can't"),
        ({"title": "\ud800"}, "json_schema holds half a surrogate pair"),
        ({"enum": ["x" * 70_000]}, "json_schema has 70,0.. bytes, the limit is 65,536"),
        ("[" * 60_000, "json_schema is nested more than 100 deep"),
        ({"multipleOf": 10_007}, "json_schema has a multipleOf of 10,007"),
    ],
)
def test_a_schema_that_can_not_be_used_is_refused(given: object, fault: str) -> None:
    """Each of them would fail later, with less of a reason."""
    with pytest.raises((TypeError, ValueError), match=fault):
        grammar(json_schema=given)


def test_a_schema_that_contains_itself_is_refused() -> None:
    """As Python data it can; references are how JSON says it."""
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(ValueError, match="json_schema holds what JSON can't"):
        grammar(json_schema=schema)


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
        ("grammar", "root ::= a\n" + "a ::= b\n" * 500, "grammar has 501 rules"),
        ("grammar", "start: A & B", "grammar has &"),
    ],
)
def test_an_expression_or_grammar_that_can_not_be_used_is_refused(
    field: str, given: object, fault: str
) -> None:
    """Before it is compiled where that can be told."""
    with pytest.raises((TypeError, ValueError), match=fault):
        grammar(**{field: given})


def test_a_grammar_is_lark_or_gbnf() -> None:
    """Both are written for other engines."""
    assert grammar(grammar='start: "a" | "b"') == 'start: "a" | "b"'
    assert "start:" in grammar(grammar='root ::= "a" | [^&"~]')


def test_the_field_can_be_told_from_the_grammar() -> None:
    """An error names it."""
    made = grammar_of(SimpleNamespace(choice=["a"]))
    assert structured.field_of(made) == "choice"


def test_a_long_message_is_cut_to_its_point() -> None:
    """The library quotes the expression, and points at the fault on lines of their own."""
    quoted = "at 1(8): regex parse error:\n    (\n    ^\nerror: unclosed group\n<non-verbose/>"
    assert structured.shortened(quoted) == "unclosed group"
    assert structured.shortened("at 12(3): " + "x" * 500) == "x" * structured.MAX_MESSAGE + "..."
    assert structured.shortened("at 1(8): failed to compile JSON schema: no") == "no"
    assert structured.shortened("") == ""
