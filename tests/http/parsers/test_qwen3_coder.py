"""Calls as `<function=NAME>` with a `<parameter=NAME>` for each argument."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.parsers.pieces import Content, Piece, ToolCallArguments, ToolCallStart
from megallm.http.parsers.qwen3_coder import Qwen3CoderSyntax
from megallm.http.parsers.tool_calls import Call, ToolCallParser
from tests.http.parsers.splitting import numbered_ids, parse, splits, texts

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "strange": True,
}
TOOLS: list[dict[str, Any]] = [  # Any: a definition is JSON
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
    },
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": "no definition"},
]


def parameter(name: str, value: str) -> str:
    """Gives a parameter as the template writes it."""
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def read(text: str) -> list[Call] | None:
    """Gives the calls of one section."""
    return Qwen3CoderSyntax(TOOLS).read(f"<tool_call>\n{text}\n</tool_call>")


def value_of(name: str, written: str) -> object:
    """Gives what a parameter becomes."""
    calls = read(f"<function=f>\n{parameter(name, written)}</function>")
    assert calls is not None
    return json.loads(calls[0].arguments)[name]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", " two\n\nlines ", " two\n\nlines "),
        ("text", "null", None),
        ("count", "12", 12),
        ("count", "12.0", 12),
        ("count", "1.5", "1.5"),
        ("count", "many", "many"),
        ("count", "9" * 30, int("9" * 30)),
        ("count", "9" * 5000, "9" * 5000),
        ("ratio", "1.5", 1.5),
        ("ratio", "2.0", 2),
        ("ratio", "1e300", 1e300),
        ("ratio", "nan", "nan"),
        ("ratio", "1e999", "1e999"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "yes", "yes"),
        ("items", "[1, 2]", [1, 2]),
        ("items", "(1, 2)", "(1, 2)"),
        ("items", "{'a'}", "{'a'}"),
        ("items", "[" * 9000, "[" * 9000),
        ("items", "[" * 90_000, "[" * 90_000),
        ("items", "-" * 9000 + "1", "-" * 9000 + "1"),
        ("options", '{"a": true}', {"a": True}),
        ("options", "{'a': True, 'b': None}", {"a": True, "b": None}),
        ("options", "{'a': b'x'}", "{'a': b'x'}"),
        ("options", "{'a': '\\ud800'}", "{'a': '\\ud800'}"),
        ("options", "[1]", "[1]"),
        ("maybe", "3", 3),
        ("maybe", "null", None),
        ("either", "3", 3),
        ("either", "three", "three"),
        ("strange", "3", "3"),
        ("unknown", "3", "3"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_is_read_as_its_declared_type(name: str, written: str, value: object) -> None:
    """A tool that declares an integer fails on a string; what can't be read stays as the model wrote it."""
    assert value_of(name, written) == value
    assert type(value_of(name, written)) is type(value)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<function=f>\n</function>", [Call("f", "{}")]),
        ("<function=f></function>\n<function=g></function>", [Call("f", "{}"), Call("g", "{}")]),
        (
            "<function=f>\n<parameter=count>1<parameter=text>a</function>",
            [Call("f", '{"count":1,"text":"a"}')],
        ),
        ("<function=other><parameter=count>1</parameter></function>", [Call("other", '{"count":"1"}')]),
        ("<function=g><parameter=count>1</parameter></function>", [Call("g", '{"count":"1"}')]),
        ("", None),
        ("words", None),
        ("<function=f>", None),
        ("<function=>\n</function>", None),
        ("<function=f>words</function>", None),
        ('<function=f>{"count": 1}</function>', None),
        ("<function=f><parameter=count>1</parameter>words</function>", None),
        ("<function=f></function>words", None),
        ("<function=f><parameter=count>1", None),
    ],
)
def test_a_section_is_functions_and_nothing_else(text: str, calls: list[Call] | None) -> None:
    """A closing tag left out is common and clear; anything else would call a tool with half its arguments."""
    assert read(text) == calls


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (
            f"I look.\n<tool_call>\n<function=f>\n{parameter('count', '1')}</function>\n</tool_call>",
            "I look.\n",
        ),
        (f"<function=f>\n{parameter('count', '1')}</function>", ""),
        (f"<tool_call><function=f>\n{parameter('count', '1')}</function>", ""),
    ],
    ids=["marked", "bare", "cut off"],
)
def test_functions_are_found_with_markers_and_without(text: str, before: str) -> None:
    """Models leave the outer markers out."""
    pieces: list[Piece] = [Content(before)] if before else []
    pieces += [ToolCallStart(0, "call 0", "f"), ToolCallArguments(0, '{"count":1}')]
    assert parse(ToolCallParser(Qwen3CoderSyntax(TOOLS), numbered_ids()), [text]) == pieces


@given(st.data())
def test_any_split_gives_the_same_pieces(data: st.DataObject) -> None:
    """What a client reads must not depend on how many tokens came at once."""
    words = (
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=count>",
        "</parameter>",
    )
    text = data.draw(texts(*words, "1", "\n"))

    def parser() -> ToolCallParser:
        return ToolCallParser(Qwen3CoderSyntax(TOOLS), numbered_ids())

    assert parse(parser(), data.draw(splits(text))) == parse(parser(), [text])
