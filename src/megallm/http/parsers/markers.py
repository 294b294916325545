"""Finds markers in text that comes in parts: what is certain, and what could still begin one. Pure."""

import re
from collections.abc import Sequence

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
    """Finds where a text that grows first has a marker; each character is looked at once."""

    def __init__(self, marker: str, start: int = 0) -> None:
        """`start`: where in the text to begin."""
        self._marker = marker
        self._seen = start

    def find(self, text: str) -> int | None:
        """Gives where the marker starts; None while it is not there. `text` is the one before, or longer."""
        start = text.find(self._marker, self._seen)
        self._seen = max(self._seen, len(text) - len(self._marker) + 1)
        return start if start >= 0 else None


class JsonEnd:
    """The same, in JSON: a marker inside a string is a part of the string."""

    def __init__(self, marker: str, start: int = 0) -> None:
        """`start`: where in the text to begin."""
        self._marker = marker
        self._outside = re.compile(f'"|{re.escape(marker)}')
        self._seen = start
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Gives where the marker starts; None while it is not there. `text` is the one before, or longer."""
        while True:
            if self._in_string:
                match = _IN_STRING.search(text, self._seen)
                if match is None:
                    # a backslash at the very end waits for the character it escapes
                    self._seen = len(text) - text.endswith("\\", self._seen)
                    return None
                self._seen = match.end()
                self._in_string = match[0] != '"'
                continue
            match = self._outside.search(text, self._seen)
            if match is None:
                self._seen = max(self._seen, len(text) - len(self._marker) + 1)
                return None
            if match[0] != '"':
                return match.start()
            self._seen = match.end()
            self._in_string = True


_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
