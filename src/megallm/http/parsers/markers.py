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
    after: str
    """What follows the marker; without one, the end of the text that could be the start of one."""


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Looks for the first of some markers, none of which is the start of another."""
    starts = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    if starts:
        start, marker = min(starts)
        return Found(text[:start], marker, text[start + len(marker) :])
    num_open = max((_num_open(text, marker) for marker in markers), default=0)
    return Found(text[: len(text) - num_open], None, text[len(text) - num_open :])


def _num_open(text: str, marker: str) -> int:
    """Characters at the end of the text that are the start of the marker."""
    return next(
        (num for num in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:num])), 0
    )


class TextEnd:
    """Finds where a text that grows first has a marker; each character is looked at once."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._seen = 0

    def find(self, text: str) -> int | None:
        """Gives where the marker starts; None while it is not there. `text` is the one before, or longer."""
        start = text.find(self._marker, self._seen)
        self._seen = max(0, len(text) - len(self._marker) + 1)
        return start if start >= 0 else None


class JsonEnd:
    """The same, in JSON: a marker inside a string is a part of the string."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._outside = re.compile(f'"|{re.escape(marker)}')
        self._seen = 0
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
