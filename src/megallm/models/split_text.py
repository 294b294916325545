"""Text cut at the special tokens that are spelled out in it; knows no tokenizer."""

import re
from collections.abc import Iterator, Mapping


class SpecialSplitter:
    """Cuts texts at special tokens, the longest first where several begin at one place."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def parts(self, text: str) -> Iterator[str | int]:
        """Gives the text between special tokens and the ids of these, in order; empty texts are left out."""
        last = 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            if found.start() > last:
                yield text[last : found.start()]
            yield self._ids[found[0]]
            last = found.end()
        if last < len(text):
            yield text[last:]
