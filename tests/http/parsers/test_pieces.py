"""What a model's output is made of."""

from megallm.http.parsers.pieces import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    first_call_only,
    join_pieces,
)


def test_neighbours_of_a_kind_become_one_piece() -> None:
    """An answer that is not streamed has one text and one reasoning."""
    pieces = [Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), Reasoning("e")]
    assert join_pieces(pieces) == [Reasoning("ab"), Content("cd"), Reasoning("e")]


def test_fragments_join_the_call_that_they_are_of() -> None:
    """Calls may be written at the same time, and a fragment is useless in another call."""
    starts = [ToolCallStart(0, "x", "f"), ToolCallStart(1, "y", "g")]
    fragments = [
        ToolCallArguments(0, "{"),
        ToolCallArguments(1, "["),
        ToolCallArguments(0, "}"),
        ToolCallArguments(1, "]"),
    ]
    assert join_pieces([*starts, *fragments]) == [
        *starts,
        ToolCallArguments(0, "{}"),
        ToolCallArguments(1, "[]"),
    ]


def test_the_calls_after_the_first_can_be_left_out() -> None:
    """A client that asked for no parallel calls handles one; the text stays."""
    first = [Content("a"), ToolCallStart(0, "x", "f"), ToolCallArguments(0, "{}")]
    later = [ToolCallStart(1, "y", "g"), ToolCallArguments(1, "{}")]
    assert first_call_only([*first, *later, Content("b")]) == [*first, Content("b")]
