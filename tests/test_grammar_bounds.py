"""A grammar that may come from a stranger stays within what llguidance is soon done with."""

from typing import Any

import pytest

from megallm.core_async.grammar_bounds import (
    Json,
    check_num_rules,
    check_rules,
    check_schema,
    check_size,
    read_json,
)


def test_a_text_has_a_largest_size() -> None:
    """Compiling takes more than in proportion to it."""
    check_size("regex", "x" * 65_536)
    with pytest.raises(ValueError, match="regex has 65,538 bytes, the limit is 65,536"):
        check_size("regex", "é" * 32_769)
    with pytest.raises(ValueError, match="choice holds half a surrogate pair, at character 1"):
        check_size("choice", "a\ud800")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, -1e999]", "", "{"])
def test_what_json_does_not_know_is_no_json(text: str) -> None:
    """Python's reader takes some of it, llguidance's does not."""
    with pytest.raises(ValueError):  # noqa: PT011 - what Python says
        read_json(text)


def test_json_ends_where_it_ends() -> None:
    """In a grammar, rules follow it."""
    assert read_json('x: {"a": 1.5} "b"', 3) == ({"a": 1.5}, 13)


def nested(depth: int) -> Json:
    """Gives a schema of `depth` objects inside each other."""
    schema: Json = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def links(link: dict[str, Any], length: int) -> dict[str, Json]:
    """Gives a schema that is a chain of references, each beside the same."""
    definitions: dict[str, Json] = {
        str(place): link | {"$ref": f"#/$defs/{place + 1}"} for place in range(length)
    }
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(length): {}}}


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (nested(101), "x is nested more than 100 deep"),
        ({"properties": dict.fromkeys(map(str, range(1001)))}, "object of 1,001 properties"),
        ({"multipleOf": 10_007}, "multipleOf of 10,007"),
        ({"multipleOf": 1.23456}, "multipleOf of 123,456"),
        ({"multipleOf": 123_000}, "multipleOf of 123,000"),
        ({"items": [{"multipleOf": 1234567890}]}, "multipleOf of 1,234,567,890"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 109}]}, "multipleOf of 10,573"),
        ({"allOf": [{"pattern": str(number)} for number in range(9)]}, "9 patterns and formats at once"),
        ({"pattern": "a", "anyOf": [{}, {"allOf": [{"format": "uri"}] * 8}]}, "9 patterns and formats"),
        (links({"pattern": "a"}, 9), "9 patterns and formats at once"),
        (links({}, 1500), r"x has too long a chain of \$ref"),
    ],
)
def test_a_schema_that_would_take_too_long_is_refused(schema: Json, fault: str) -> None:
    """Each of them keeps a core busy for seconds or minutes, or overflows a stack."""
    with pytest.raises(ValueError, match=fault):
        check_schema("x", schema)


@pytest.mark.parametrize(
    "schema",
    [
        nested(100),
        {"properties": {str(number): {"pattern": str(number)} for number in range(100)}},
        {"anyOf": [{"pattern": str(number)} for number in range(100)]},
        links({"allOf": [{"$ref": "#/$defs/60"}] * 2}, 60),
        {"$ref": "#", "allOf": [{"$ref": "#/allOf/0"}, {"$ref": "#/allOf/9"}, {"$ref": "#/no/where"}, True]},
        {"$ref": "elsewhere#/x", "pattern": "a", "properties": {"pattern": {"type": "string"}}},
        {"$ref": "#/$defs/a~1b/~0", "$defs": {"a/b": {"~": {"pattern": "a"}}}},
        {"allOf": [{"multipleOf": number} for number in (0.01, 1e-6, 1_000_000, 0.25, 0, 7)]},
        {"allOf": "none", "multipleOf": "none", "properties": None},
    ],
    ids=["deep", "apart", "either", "2**60 ways", "itself", "elsewhere", "escaped", "tens", "wrong types"],
)
def test_a_schema_that_only_looks_large_is_fine(schema: Json) -> None:
    """What is wrong with it otherwise, llguidance says."""
    check_schema("x", schema)


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("start: A & B", "grammar has & in line 1"),
        ('start: A\nA: (~ /x/ | "y")', "grammar has ~ in line 2"),
        ('start: "" /x/ & A', "grammar has & in line 1"),
        ('start: %json {"multipleOf": 10007}', "grammar has a multipleOf of 10,007"),
        ("start: %json " + "[" * 60_000, "grammar is nested more than 100 deep"),
        ('start: "a"\nb: %json {"a": 1e999}', "no JSON behind %json in line 2"),
        ("\n".join(f"r{number}: r{number + 1}" for number in range(501)), "501 rules, the limit is 500"),
    ],
)
def test_a_grammar_that_would_take_too_long_is_refused(grammar: str, fault: str) -> None:
    """Intersections take minutes, and what is inline has the bounds of its own field."""
    with pytest.raises(ValueError, match=fault):
        check_rules(grammar)


def test_a_sign_inside_a_string_is_no_operator() -> None:
    """HTML is full of them."""
    check_rules(
        'start: "a & ~b \\" &" /[&~:\\/]&/ <a&b> a~3..4 b ~ 2 // & not\n# ~ here\n'
        'x: %json {"const": "& \\" ~"} %regex {"substring_chars": "&"} "&"'
    )


def test_rules_of_gbnf_are_counted_before_they_are_converted() -> None:
    """Converting takes the square of their number, in Python."""
    check_num_rules(500)
    with pytest.raises(ValueError, match="grammar has 501 rules"):
        check_num_rules(501)
