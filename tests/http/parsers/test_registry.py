"""The parsers by name, and the chain of several."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from megallm.http.parsers.pieces import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from megallm.http.parsers.registry import PARSER_NAMES, check_parsers, make_parser
from tests.http.parsers.splitting import parse, splits, texts

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]  # Any: a definition is JSON
HERMES_CALL = '<tool_call>{"name": "f"}</tool_call>'
QWEN_CALL = "<tool_call><function=f></function></tool_call>"


def parse_with(
    names: tuple[str, ...],
    parts: list[str],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> list[Piece]:
    """Gives the joined pieces; the ids of calls, which are random, are left out."""
    pieces = parse(make_parser(names, tools, options), parts)
    return [structs.replace(piece, id="") if isinstance(piece, ToolCallStart) else piece for piece in pieces]


CALL: list[Piece] = [ToolCallStart(0, "", "f"), ToolCallArguments(0, "{}")]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """A typing mistake should be seen when the server starts, and easy to mend."""
    known = re.escape(", ".join(PARSER_NAMES))
    with pytest.raises(ValueError, match=f"parser 'hermess' is unknown; known are {known}"):
        check_parsers(["hermes", "hermess"])
    with pytest.raises(ValueError, match="'json' is unknown"):
        make_parser(("json",))
    check_parsers(PARSER_NAMES)


def test_without_a_parser_everything_is_content() -> None:
    """Most models have neither reasoning nor calls."""
    assert parse_with((), ["<think>a", "</think>", "", HERMES_CALL], TOOLS) == [
        Content(f"<think>a</think>{HERMES_CALL}")
    ]


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES_CALL), ("qwen3-coder-tool", QWEN_CALL)])
def test_reasoning_and_calls_are_taken_apart_together(name: str, text: str) -> None:
    """A call may follow the answer, or end a reasoning that was never closed."""
    names = ("deepseek-r1-reasoning", name)
    assert parse_with(names, [f"a</think>b {text}"], TOOLS) == [Reasoning("a"), Content("b "), *CALL]
    assert parse_with(names, [f"a</think>\n{text}\n"], TOOLS) == [Reasoning("a"), *CALL]
    assert parse_with(names, [f"a {text}"], TOOLS) == [Reasoning("a "), *CALL]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_calls_are_text(tools: list[dict[str, Any]] | None) -> None:
    """A client that offered no tool does not expect a call of one."""
    assert parse_with(("hermes",), [HERMES_CALL], tools) == [Content(HERMES_CALL)]
    assert parse_with(("deepseek-r1-reasoning", "hermes"), [HERMES_CALL], tools) == [Reasoning(HERMES_CALL)]


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (None, [Reasoning("a")]),
        ({"enable_thinking": True}, [Reasoning("a")]),
        ({"enable_thinking": False}, [Content("a")]),
        ({"force_nonempty_content": True}, [Content("a")]),
    ],
)
def test_nemotron_reads_the_options_of_its_template(
    options: dict[str, Any] | None, pieces: list[Piece]
) -> None:
    """With reasoning switched off in the prompt, the answer would be taken for reasoning."""
    assert parse_with(("nemotron-v3-reasoning",), ["a"], options=options) == pieces
    assert parse_with(("deepseek-r1-reasoning",), ["a"], options=options) == [Reasoning("a")]


@pytest.mark.parametrize("reasoning", ["deepseek-r1-reasoning", "nemotron-v3-reasoning"])
@pytest.mark.parametrize("tool", ["hermes", "qwen3-coder-tool"])
@given(st.data())
def test_any_split_gives_the_same_pieces(reasoning: str, tool: str, data: st.DataObject) -> None:
    """Two parsers in a row hold back twice; still nothing may depend on the deltas."""
    text = data.draw(
        texts("<think>", "</think>", HERMES_CALL, QWEN_CALL, "<tool_call>", "</tool_call>", "a", " ")
    )
    names = (reasoning, tool)
    assert parse_with(names, data.draw(splits(text)), TOOLS) == parse_with(names, [text], TOOLS)
