"""What a model's output is made of, and the protocol of the parsers that take it apart.

Pure: knows neither a tokenizer nor HTTP.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


class Content(Struct, frozen=True, gc=False):
    """Text for the reader."""

    text: str


class Reasoning(Struct, frozen=True, gc=False):
    """Text the model thinks with, before its answer."""

    text: str


class ToolCallStart(Struct, frozen=True, gc=False):
    """A call of a tool begins; its arguments follow in fragments."""

    index: int
    """Place among the calls of this output, from 0."""
    id: str
    """Unique to this call; later messages name it."""
    name: str


class ToolCallArguments(Struct, frozen=True, gc=False):
    """A part of one call's arguments; all the fragments of an index joined are one JSON object."""

    index: int
    fragment: str


type Piece = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Takes one output apart, a delta at a time. One parser an output; it is used up by `finish`."""

    def feed(self, text: str) -> list[Piece]:
        """Gives the pieces that are certain by now; text that could begin a marker is held back."""
        ...

    def finish(self) -> list[Piece]:
        """Gives what was held back: the output has ended."""
        ...


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Gives an output's pieces with what belongs together joined: neighbours, and each call's arguments.

    This is what the parts of a stream must equal, however its text was split.
    """
    joined: list[Piece] = []
    places: dict[int, int] = {}
    for piece in pieces:
        last = joined[-1] if joined else None
        match piece:
            case Content(text) if isinstance(last, Content):
                joined[-1] = Content(last.text + text)
            case Reasoning(text) if isinstance(last, Reasoning):
                joined[-1] = Reasoning(last.text + text)
            case ToolCallArguments(index, fragment) if index in places:
                whole = joined[places[index]]
                assert isinstance(whole, ToolCallArguments)
                joined[places[index]] = ToolCallArguments(index, whole.fragment + fragment)
            case _:
                if isinstance(piece, ToolCallArguments):
                    places[piece.index] = len(joined)
                joined.append(piece)
    return joined


def first_call_only(pieces: Iterable[Piece]) -> list[Piece]:
    """Leaves out the calls after an output's first, for a client that takes one at a time."""
    return [
        piece
        for piece in pieces
        if not isinstance(piece, ToolCallStart | ToolCallArguments) or piece.index == 0
    ]
