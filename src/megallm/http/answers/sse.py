"""Server-sent events: what is ready is sent in one write, an error is the last frame.

The body of a response is a plain object whose cleanup is synchronous, so that it works in any cancel.
Knows no API: a source says what the frames hold.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol, Self

import msgspec

from megallm.http.errors import error_object

log = logging.getLogger(__name__)

_ENCODER: Final = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that gathers output would hold tokens back
}


class Source(Protocol):
    """Who makes the events of one stream."""

    async def next_frames(self) -> bytes | None:
        """Waits for what is to be sent next; None at the end of the stream."""
        ...


def frame(event: object) -> bytes:
    """Gives an event as one frame."""
    return b"data: %b\n\n" % _ENCODER.encode(event)


class ChunkFrames:
    """Writes one stream's chunks, which differ in their choice alone: the rest is made once."""

    def __init__(self, head: Mapping[str, object]) -> None:
        """`head`: the fields before `choices`."""
        self._start = b'data: %b,"choices":[' % _ENCODER.encode(head)[:-1]

    def chunk(self, choice: object) -> bytes:
        """Gives a chunk of one choice as a frame."""
        return b"%b%b]}\n\n" % (self._start, _ENCODER.encode(choice))


def error_frame(error: BaseException) -> bytes:
    """Gives the frame that ends a stream for an error."""
    return b"data: %b\n\n" % error_object(error)


class EventStream:
    """The body of a streamed response, for one reader.

    An error ends it with one error frame. However it is left, `on_close` is called once, with the error.
    """

    def __init__(self, source: Source, on_close: Callable[[Exception | None], None]) -> None:
        self._source = source
        self._on_close: Callable[[Exception | None], None] | None = on_close

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Waits for the next frames; a cancel closes the stream."""
        if self._on_close is None:
            raise StopAsyncIteration
        try:
            frames = await self._source.next_frames()
        except Exception as error:  # noqa: BLE001 - the status is sent: what failed can only be told in band
            self._close(error)
            return error_frame(error)
        except BaseException:
            self._close()
            raise
        if frames is None:
            self._close()
            raise StopAsyncIteration
        return frames

    async def aclose(self) -> None:
        """Leaves the stream; waits for nothing."""
        self._close()

    def _close(self, error: Exception | None = None) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(error)
