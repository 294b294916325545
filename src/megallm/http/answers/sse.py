"""Server-sent events: what is ready is sent in one write, an error is the last frame.

The body of a response is a plain object whose cleanup is synchronous, so that it works in any cancel.
Knows no API: a source says what the frames hold.
"""

import logging
from collections.abc import Callable
from typing import Protocol, Self

import msgspec

from megallm.http.errors import error_object

log = logging.getLogger(__name__)

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
    return b"data: %b\n\n" % msgspec.json.encode(event)


def error_frame(error: BaseException) -> bytes:
    """Gives the frame that ends a stream for an error."""
    return b"data: %b\n\n" % error_object(error)


class EventStream:
    """The body of a streamed response, for one reader.

    An error ends it with one error frame. However it is left, `on_close` is called once.
    """

    def __init__(self, source: Source, on_close: Callable[[], None]) -> None:
        self._source = source
        self._on_close: Callable[[], None] | None = on_close

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Waits for the next frames; a cancel closes the stream."""
        if self._on_close is None:
            raise StopAsyncIteration
        try:
            frames = await self._source.next_frames()
        except Exception as error:  # noqa: BLE001 - the status is sent: what failed can only be told in band
            self._close()
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

    def _close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()
