"""Feeds a text to a parser in parts, and joins what comes out."""

import itertools
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from megallm.http.parsers.pieces import OutputParser, Piece, join_pieces


def parse(parser: OutputParser, parts: Sequence[str]) -> list[Piece]:
    """Gives the joined pieces of an output that comes in these parts."""
    pieces = list(itertools.chain.from_iterable(map(parser.feed, parts)))
    return join_pieces(pieces + parser.finish())


def numbered_ids() -> Callable[[], str]:
    """Gives ids that a test knows in advance: "call 0", "call 1"."""
    numbers = itertools.count()
    return lambda: f"call {next(numbers)}"


def texts(*words: str) -> st.SearchStrategy[str]:
    """Gives texts in which these words, whole and broken, stand in any order."""
    broken = st.sampled_from(words).flatmap(
        lambda word: st.integers(0, len(word)).map(lambda length: word[:length])
    )
    return st.lists(st.sampled_from(words) | broken | st.text(max_size=3), max_size=12).map("".join)


def splits(text: str) -> st.SearchStrategy[list[str]]:
    """Gives the ways to cut a text in parts, empty ones too."""
    cuts = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    return cuts.map(
        lambda places: [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    )
