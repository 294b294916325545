"""Tool calls in an output, here in a syntax so simple that only the sections matter."""

from typing import override

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.parsers.markers import TextEnd
from megallm.http.parsers.pieces import Content, Piece, ToolCallArguments, ToolCallStart
from megallm.http.parsers.tool_calls import Call, Markers, ToolCallParser, make_call_id
from tests.http.parsers.splitting import numbered_ids, parse, splits, texts


class OneWord:
    """`[f]` calls f; anything else in the brackets is not well formed."""

    sections = (Markers("[", "]"), Markers("((", "))"))

    def read(self, section: str) -> list[Call] | None:
        """Gives a call for each letter f or g."""
        name = section.strip("[]()")
        return [Call(letter, "{}") for letter in name] if name and set(name) <= {"f", "g"} else None


def parser() -> ToolCallParser:
    """Gives a parser of the simple syntax."""
    return ToolCallParser(OneWord(), numbered_ids())


def call(index: int, name: str) -> list[Piece]:
    """Gives the pieces of a call."""
    return [ToolCallStart(index, f"call {index}", name), ToolCallArguments(index, "{}")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("no call", [Content("no call")]),
        ("[f]", call(0, "f")),
        ("I call. [f]", [Content("I call. "), *call(0, "f")]),
        ("\n[f]\n[g]\n", [*call(0, "f"), *call(1, "g")]),
        ("[fg]", [*call(0, "f"), *call(1, "g")]),
        ("((g))", call(0, "g")),
        ("[f] then [g]", [*call(0, "f"), Content(" then "), *call(1, "g")]),
        ("[f", call(0, "f")),
        ("[x]", [Content("[x]")]),
        (" [x]", [Content(" [x]")]),
        ("[f]\n[x] [g]", [*call(0, "f"), Content("\n[x] "), *call(1, "g")]),
        ("[x", [Content("[x")]),
        ("[f] (", [*call(0, "f"), Content(" (")]),
        (" \n", [Content(" \n")]),
        ("", []),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, pieces: list[Piece]) -> None:
    """A call that is not well formed stays readable; blanks round calls are no answer."""
    assert parse(parser(), [text]) == pieces


def test_text_that_could_begin_a_call_waits() -> None:
    """A client that was shown half a marker can't forget it."""
    each = parser()
    assert [each.feed(part) for part in ("a (", "b", " ((", "f)", ")")] == [
        [Content("a ")],
        [Content("(b")],
        [Content(" ")],
        [],
        call(0, "f"),
    ]


@given(st.data())
def test_any_split_gives_the_same_pieces(data: st.DataObject) -> None:
    """What a client reads must not depend on how many tokens came at once."""
    text = data.draw(texts("[", "]", "((", "))", "f", "g", "x", " ", "\n"))
    assert parse(parser(), data.draw(splits(text))) == parse(parser(), [text])


def test_a_long_call_in_many_parts_is_looked_at_once() -> None:
    """A file that is written by a call comes in fifty thousand parts; seconds went by with looking back."""
    num_seen = 0

    class Counting(TextEnd):
        @override
        def find(self, part: str, start: int = 0) -> int | None:
            nonlocal num_seen
            num_seen += len(part) - start
            return super().find(part, start)

    syntax = OneWord()
    syntax.sections = (Markers("[", "]", Counting), Markers("((", "))"))
    parts = ["[", *("f" for _ in range(1000)), "]"]
    pieces = parse(ToolCallParser(syntax, numbered_ids()), parts)
    assert sum(isinstance(piece, ToolCallStart) for piece in pieces) == 1000
    assert num_seen == len(parts) - 1


def test_each_call_has_an_id_of_its_own() -> None:
    """A client answers a call by its id."""
    assert len({make_call_id() for _ in range(100)}) == 100
