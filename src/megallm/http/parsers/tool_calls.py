"""Takes tool calls out of an output, whatever their syntax. Pure.

A call is given once it is whole and well formed: what was given can't be taken back, and a call that
is not well formed is content, markers and all. An output that ends inside a call gives the call only
where nothing but the end marker is missing.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from megallm.http.parsers.markers import JsonEnd, MarkerFinder, TextEnd
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
    make_end: Callable[[str, int], TextEnd | JsonEnd] = TextEnd
    """Makes what finds the end, of the end marker and of where to begin."""


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
        self._text = ""
        self._at = 0
        """What comes before this place of the text was given; inside a section, where it starts."""
        self._end: TextEnd | JsonEnd | None = None
        """What finds the end of the section that the text is inside of."""
        self._end_marker = ""
        self._blanks = ""
        """Blanks at a place where they may be no content."""
        self._is_inside_content = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Gives the pieces that are certain by now; a section is held back until its end."""
        self._text += text
        pieces: list[Piece] = []
        while self._read_section(pieces) if self._end else self._read_content(pieces):
            pass
        self._drop_given()
        return pieces

    def finish(self) -> list[Piece]:
        """Gives what was held back: the output has ended."""
        pieces: list[Piece] = []
        if self._end:
            self._close_section(len(self._text), pieces)
        self._add_content(self._text[self._at :], pieces)
        if not self._num_calls and self._blanks:
            pieces.append(Content(self._blanks))
        self._text, self._at, self._blanks = "", 0, ""
        return pieces

    def _drop_given(self) -> None:
        if not self._end:  # the place where its search goes on is one of the whole text
            self._text, self._at = self._text[self._at :], 0

    def _read_content(self, pieces: list[Piece]) -> bool:
        """Gives what comes before the next section; True when there is one."""
        found = self._starts.find(self._text, self._at)
        self._add_content(found.before, pieces)
        self._at = found.end
        if found.marker is None:
            return False
        self._at -= len(found.marker)
        markers = self._sections[found.marker]
        self._end, self._end_marker = markers.make_end(markers.end, found.end), markers.end
        return True

    def _read_section(self, pieces: list[Piece]) -> bool:
        """Gives the section's calls; True when it has ended."""
        assert self._end
        start = self._end.find(self._text)
        if start is None:
            return False
        self._close_section(start + len(self._end_marker), pieces)
        return True

    def _close_section(self, end: int, pieces: list[Piece]) -> None:
        section, self._at, self._end = self._text[self._at : end], end, None
        calls = self._syntax.read(section)
        if calls is None:
            self._add_content(section, pieces)
            return
        self._blanks, self._is_inside_content = "", False
        for call in calls:
            pieces.append(ToolCallStart(self._num_calls, self._make_id(), call.name))
            pieces.append(ToolCallArguments(self._num_calls, call.arguments))
            self._num_calls += 1

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if not self._is_inside_content:
            text = self._blanks + text
            self._is_inside_content = bool(text.strip())
            self._blanks = "" if self._is_inside_content else text
        if self._is_inside_content and text:
            pieces.append(Content(text))
