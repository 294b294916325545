"""Finds markers in text that comes in parts: what is certain, and what could still begin one. Pure."""

import re
from collections.abc import Sequence
from typing import override

from msgspec import Struct


class Found(Struct, frozen=True, gc=False):
    """What a look at some text told."""

    before: str
    """Text that no marker is in."""
    marker: str | None
    """The first marker; None when there is none so far."""
    end: int
    """Where the text goes on: behind the marker, or where one could begin at the end of the text."""


class MarkerFinder:
    """Finds the first of some markers, none of which is the start of another."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._firsts = {marker[0] for marker in markers}
        self._pattern = re.compile("|".join(map(re.escape, markers)))

    def find(self, text: str, start: int = 0) -> Found:
        """Looks at a text from `start` on."""
        if not start and self._firsts.isdisjoint(text):  # most deltas
            return Found(text, None, len(text))
        match = self._pattern.search(text, start)
        if match is not None:
            return Found(text[start : match.start()], match[0], match.end())
        end = len(text) - max(_num_open(text, marker, start) for marker in self._markers)
        return Found(text[start:end], None, end)


def _num_open(text: str, marker: str, start: int) -> int:
    """Characters at the end of the text that are the start of the marker."""
    place = max(start, len(text) - len(marker) + 1)
    while (place := text.find(marker[0], place)) >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place += 1
    return 0


class TextEnd:
    """Finds where a text that comes in parts first has a marker; each character is looked at once."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._rest = ""
        """The end of what came, which may go on as a marker."""

    def find(self, part: str, start: int = 0) -> int | None:
        """Gives where the first marker ends in this part; None while it is not there.

        `start`: where to begin, in the first part.
        """
        assert not start or not self._rest, f"a later part is read from its beginning, not from {start}"
        text, num_before = self._rest + part, len(self._rest)
        end = self._end_in(text, start)
        return None if end is None else end - num_before

    def _end_in(self, text: str, start: int) -> int | None:
        """Gives where the marker ends in a text; keeps the end of one that has none."""
        found = text.find(self._marker, start)
        if found >= 0:
            return found + len(self._marker)
        self._rest = text[max(start, len(text) - len(self._marker) + 1) :]
        return None


class JsonEnd(TextEnd):
    """The same, in JSON: a marker inside a string is a part of the string."""

    def __init__(self, marker: str) -> None:
        super().__init__(marker)
        self._outside = re.compile(f'"|{re.escape(marker)}')
        self._in_string = False

    @override
    def _end_in(self, text: str, start: int) -> int | None:
        while True:
            match = (_IN_STRING if self._in_string else self._outside).search(text, start)
            if match is None:
                # a backslash at the very end waits for the character it escapes
                num_open = text.endswith("\\", start) if self._in_string else len(self._marker) - 1
                self._rest = text[max(start, len(text) - num_open) :]
                return None
            start = match.end()
            if self._in_string:
                self._in_string = match[0] != '"'
            elif match[0] == '"':
                self._in_string = True
            else:
                return start


_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
