"""The frames of a generation's choices as they come."""

from typing import cast

import pytest

from megallm.core_async.messages import Delta
from megallm.http.answers.choice_stream import ChoiceStream
from megallm.http.answers.generation import Generation
from megallm.http.answers.sse import DONE

pytestmark = pytest.mark.anyio


class Given:
    """A generation whose news are given."""

    def __init__(self, *news: list[tuple[int, Delta]]) -> None:
        self._news = list(news)

    @property
    def has_ended(self) -> bool:
        """Whether there are no more."""
        return not self._news

    async def next_deltas(self) -> list[tuple[int, Delta]]:
        """Gives the next."""
        return self._news.pop(0)


class Writer:
    """Writes a choice's text, if there is any."""

    def chunks(self, index: int, delta: Delta) -> bytes:
        return f"{index}{delta.text};".encode() if delta.text else b""

    def usage_chunk(self) -> bytes:
        return b"usage;"


async def frames_of(*news: list[tuple[int, Delta]], with_usage: bool = False) -> list[bytes]:
    """Gives what a stream sends, a write each."""
    generation = cast("Generation", Given(*news))  # cast: it has the part that is used
    stream = ChoiceStream(generation, Writer(), with_usage=with_usage)
    sent: list[bytes] = []
    while (frames := await stream.next_frames()) is not None:
        sent.append(frames)
    assert await stream.next_frames() is None
    return sent


async def test_what_waits_is_sent_in_one_write() -> None:
    """A write costs more than a chunk."""
    assert await frames_of([(0, Delta("a", [])), (1, Delta("b", []))], [(0, Delta("c", []))]) == [
        b"0a;1b;",
        b"0c;" + DONE,
    ]


async def test_nothing_is_sent_while_nothing_is_to_be_shown() -> None:
    """Text that may be the start of a stop string is held back."""
    assert await frames_of([(0, Delta("", []))], [(0, Delta("a", []))]) == [b"0a;" + DONE]
    assert await frames_of([(0, Delta("", []))]) == [DONE]


async def test_usage_stands_before_the_end() -> None:
    """Where it was asked for."""
    assert await frames_of([(0, Delta("a", []))], with_usage=True) == [b"0a;usage;" + DONE]
