"""Calls as JSON between `<tool_call>` and `</tool_call>`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.parsers.hermes import HermesSyntax
from megallm.http.parsers.pieces import Content, ToolCallArguments, ToolCallStart
from megallm.http.parsers.tool_calls import Call, ToolCallParser
from tests.http.parsers.splitting import numbered_ids, parse, splits

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(text: str) -> list[Call] | None:
    """Gives the calls of one section."""
    return HermesSyntax().read(f"<tool_call>{text}</tool_call>")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('\n{"name": "f", "arguments": {"a": 1}}\n', [Call("f", '{"a":1}')]),
        ('{"arguments": {}, "name": "f"}', [Call("f", "{}")]),
        ('{"name": "f"}', [Call("f", "{}")]),
        ('{"name": "f", "arguments": null}', [Call("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f", '{"a":1}')]),
        ('{"name": "f", "parameters": {"a": 1}}', [Call("f", '{"a":1}')]),
        ('[{"name": "f", "arguments": {}}, {"name": "g"}]', [Call("f", "{}"), Call("g", "{}")]),
        ('{"name": "f", "arguments": {"a": "ä"}}', [Call("f", '{"a":"ä"}')]),
    ],
)
def test_a_call_is_a_name_and_an_object(text: str, calls: list[Call]) -> None:
    """Models write the arguments as an object or a string with one, or none; SmolLM2 writes a list."""
    assert read(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "words",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": ""}',
        '{"name": 1}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "words"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        "[]",
        '[{"name": "f"}, {"name": ""}]',
        '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_call_is_refused(text: str) -> None:
    """Whatever a model writes, it must neither fail the request nor call a tool with half its arguments."""
    assert read(text) is None


@given(st.data(), st.dictionaries(st.text(), JSON, max_size=3))
def test_the_fragments_of_any_split_are_the_arguments(
    data: st.DataObject, arguments: dict[str, object]
) -> None:
    """The arguments a client joins must be the object that the model wrote, with markers in its strings."""
    arguments["x"] = "</tool_call>"
    text = f"a<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>\nb"
    pieces = parse(ToolCallParser(HermesSyntax(), numbered_ids()), data.draw(splits(text)))
    before, start, joined, after = pieces
    assert (before, start, after) == (Content("a"), ToolCallStart(0, "call 0", "f"), Content("\nb"))
    assert isinstance(joined, ToolCallArguments)
    assert json.loads(joined.fragment) == arguments


def test_an_output_cut_off_inside_a_call_calls_nothing() -> None:
    """Half the arguments could mean the opposite; only a missing end marker is forgiven."""
    whole = '<tool_call>{"name": "f", "arguments": {"a": 1}}'
    for length in range(1, len(whole)):
        assert parse(ToolCallParser(HermesSyntax(), numbered_ids()), [whole[:length]]) == [
            Content(whole[:length])
        ]
    assert parse(ToolCallParser(HermesSyntax(), numbered_ids()), [whole]) == [
        ToolCallStart(0, "call 0", "f"),
        ToolCallArguments(0, '{"a":1}'),
    ]
