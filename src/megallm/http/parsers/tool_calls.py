"""Takes tool calls out of an output, whatever their syntax. Pure.

A call is given once it is whole and well formed: what was given can't be taken back, and a call that
is not well formed is content, markers and all. An output that ends inside a call gives the call only
where nothing but the end marker is missing.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from megallm.http.parsers.markers import MarkerFinder, TextEnd
from megallm.http.parsers.pieces import Content, Piece, ToolCallArguments, ToolCallStart


class Call(Struct, frozen=True, gc=False):
    """One call: which tool, with what."""

    name: str
    arguments: str
    """A JSON object."""


class Markers(Struct, frozen=True):
    """How a section with calls begins and ends."""

    start: str
    end: str
    make_end: Callable[[str], TextEnd] = TextEnd
    """Makes what finds the end, of the end marker."""


class CallSyntax(Protocol):
    """How a family of models writes its calls."""

    @property
    def sections(self) -> Sequence[Markers]: ...

    def read(self, section: str) -> list[Call] | None:
        """Gives the calls of a section, its markers included; None where it is not well formed.

        The end marker is missing where the output ended before it.
        """
        ...


def make_call_id() -> str:
    """Gives an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """Gives the calls of an output, and all else as content.

    Blanks between calls, and blanks alone before the first one, are no content.
    """

    def __init__(self, syntax: CallSyntax, make_id: Callable[[], str] = make_call_id) -> None:
        self._syntax = syntax
        self._make_id = make_id
        self._sections = {markers.start: markers for markers in syntax.sections}
        self._starts = MarkerFinder(tuple(self._sections))
        self._held = ""
        """Text that could begin a section."""
        self._end: TextEnd | None = None
        """What finds the end of the section that the text is inside of."""
        self._section: list[str] = []
        """The parts of that section so far; joined once, as a call may come in thousands."""
        self._blanks: list[str] = []
        """Blanks at a place where they may be no content."""
        self._is_inside_content = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Gives the pieces that are certain by now; a section is held back until its end."""
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            at = self._read_section(text, at, pieces) if self._end else self._read_content(text, at, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """Gives what was held back: the output has ended."""
        pieces: list[Piece] = []
        if self._end:
            self._close_section(pieces)
        self._add_content(self._held, pieces)
        if not self._num_calls and self._blanks:
            pieces.append(Content("".join(self._blanks)))
        self._held, self._blanks = "", []
        return pieces

    def _read_content(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Gives what comes before the next section; returns how far it has read."""
        found = self._starts.find(text, at)
        self._add_content(found.before, pieces)
        if found.marker is None:
            self._held = text[found.end :]
            return len(text)
        markers = self._sections[found.marker]
        self._section, self._end = [found.marker], markers.make_end(markers.end)
        return found.end

    def _read_section(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Gives the section's calls, once it has ended; returns how far it has read."""
        assert self._end
        end = self._end.find(text, at)
        self._section.append(text[at:end])
        if end is None:
            return len(text)
        self._close_section(pieces)
        return end

    def _close_section(self, pieces: list[Piece]) -> None:
        section, self._section, self._end = "".join(self._section), [], None
        calls = self._syntax.read(section)
        if calls is None:
            self._add_content(section, pieces)
            return
        self._blanks, self._is_inside_content = [], False
        for call in calls:
            pieces.append(ToolCallStart(self._num_calls, self._make_id(), call.name))
            pieces.append(ToolCallArguments(self._num_calls, call.arguments))
            self._num_calls += 1

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if not self._is_inside_content:
            self._blanks.append(text)
            if text.isspace():
                return
            text, self._blanks, self._is_inside_content = "".join(self._blanks), [], True
        pieces.append(Content(text))
