"""Reasoning in front of an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.parsers.pieces import Content, Piece, Reasoning
from megallm.http.parsers.reasoning import ReasoningParser
from tests.http.parsers.splitting import parse, splits, texts

CALL = "<tool_call>"
VARIANTS = {
    "plain": ReasoningParser,
    "with tools": lambda: ReasoningParser(ends_before=(CALL,)),
    "off": lambda: ReasoningParser(begins_inside=False, fills_content=True),
    "filling": lambda: ReasoningParser(fills_content=True),
}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("a</think>b", [Reasoning("a"), Content("b")]),
        ("\n<think>\na\n</think>\n\nb", [Reasoning("\na\n"), Content("\n\nb")]),
        ("never closed", [Reasoning("never closed")]),
        ("<think></think>b", [Content("b")]),
        ("a<think>b</think>c", [Reasoning("ab"), Content("c")]),
        ("a</think>b<think>c</think>", [Reasoning("a"), Content("b<think>c</think>")]),
        ("<think>" * 5000 + "a", [Reasoning("a")]),
        ("a</thi", [Reasoning("a</thi")]),
        ("<thi", [Reasoning("<thi")]),
        (" \n", [Reasoning(" \n")]),
        ("", []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_reasoning_ends_at_its_marker(text: str, pieces: list[Piece]) -> None:
    """The model may have begun to reason in the prompt, and may be cut off before it answers."""
    assert parse(ReasoningParser(), [text]) == pieces


def test_a_call_ends_the_reasoning_that_was_not_closed() -> None:
    """The call would be lost in the reasoning; its marker is left to the parser of calls."""
    pieces = parse(ReasoningParser(ends_before=(CALL,)), [f"I call{CALL}x"])
    assert pieces == [Reasoning("I call"), Content(f"{CALL}x")]
    assert parse(ReasoningParser(), [f"I call{CALL}x"]) == [Reasoning(f"I call{CALL}x")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("an answer", [Content("an answer")]),
        ("<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("<think>a</think>", [Content("a")]),
        ("<think>a", [Content("a")]),
        ("<thi", [Content("<thi")]),
    ],
)
def test_without_thinking_there_is_always_content(text: str, pieces: list[Piece]) -> None:
    """Who switched reasoning off reads the content alone, and an answer must not be late for it."""
    parser = ReasoningParser(begins_inside=False, fills_content=True)
    assert parse(parser, [text]) == pieces


def test_without_thinking_the_answer_comes_at_once() -> None:
    """Nothing is held back where no reasoning has begun."""
    parser = ReasoningParser(begins_inside=False, fills_content=True)
    assert parser.feed("an") == [Content("an")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a</think>b", [Reasoning("a"), Content("b")]),
        ("a</think>", [Content("a")]),
        ("never closed", [Content("never closed")]),
    ],
)
def test_reasoning_fills_a_content_that_must_not_be_empty(text: str, pieces: list[Piece]) -> None:
    """A grader that reads the content alone asks for this."""
    assert parse(ReasoningParser(fills_content=True), [text]) == pieces


def test_reasoning_streams() -> None:
    """Only what could be a marker waits."""
    parser = ReasoningParser()
    assert [parser.feed(part) for part in ("<th", "ink>", "a b", " c</", "thin", "k>d")] == [
        [],
        [],
        [Reasoning("a b")],
        [Reasoning(" c")],
        [],
        [Content("d")],
    ]


@pytest.mark.parametrize("name", VARIANTS)
@given(st.data())
def test_any_split_gives_the_same_pieces(name: str, data: st.DataObject) -> None:
    """What a client reads must not depend on how many tokens came at once."""
    text = data.draw(texts("<think>", "</think>", CALL, " ", "a"))
    assert parse(VARIANTS[name](), data.draw(splits(text))) == parse(VARIANTS[name](), [text])


@given(texts("<think>", "</think>", CALL, " ", "a"))
def test_no_text_is_lost_but_the_markers_and_blanks_before_them(text: str) -> None:
    """A parser that drops what it does not understand hides what the model wrote."""
    pieces = parse(ReasoningParser(), [text])
    given_text = "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))
    marks = ("<think>", "</think>")
    assert given_text == text or without(given_text, *marks).lstrip() == without(text, *marks).lstrip()


def without(text: str, *markers: str) -> str:
    """Gives a text without some markers."""
    for marker in markers:
        text = text.replace(marker, "")
    return text
