"""Sees that a client has left where Hypercorn does not: behind bytes that it sent after its body.

While a response is made, Hypercorn's HTTP/1.1 protocol stops reading once a byte has come that belongs
to no request yet (h11's PAUSED): a pipelined request, or a stray line end. The end of the connection is
behind that byte, so a request that sends nothing would run to its end for nobody. Here the event that
the connection's reader waits for then is replaced by one that reads on while it waits. Touches nothing
but attributes of that one connection; behind another server it does nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import h11
import trio
from hypercorn.protocol.h11 import H11Protocol

MAX_AHEAD: Final = 1 << 20
"""Bytes of later requests that are kept; a client that sends more is read again after the response."""
CHUNK: Final = 1 << 16

type Read = Callable[[int], Awaitable[bytes | bytearray]]


async def keep_reading(send: Callable[..., Awaitable[None]]) -> None:
    """Makes the connection behind an ASGI `send` go on reading while its response is made. Idempotent."""
    protocol = _owner(getattr(_owner(send), "send", None))
    if not isinstance(protocol, H11Protocol) or isinstance(protocol.can_read, _ReadingEvent):
        return
    read = _reader_of(_owner(protocol.send))
    if read is None:
        return
    before, replaced = protocol.can_read, _ReadingEvent(protocol, read)
    protocol.can_read = replaced  # pyright: ignore[reportAttributeAccessIssue] - its protocol names __init__
    await before.set()  # a reader that waits already looks again, and then waits here


class _ReadingEvent:
    """Hypercorn's event, as the one reader of a connection waits for it, which goes on reading meanwhile."""

    def __init__(self, protocol: H11Protocol, read: Read) -> None:
        self._protocol = protocol
        self._read = read
        self._event = anyio.Event()

    async def clear(self) -> None:
        self._event = anyio.Event()

    async def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Waits until the response has ended, or the client has left."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_on, tasks.cancel_scope)
            await self._event.wait()
            tasks.cancel_scope.cancel()

    async def _read_on(self, scope: anyio.CancelScope) -> None:
        """Reads until the end of the connection, and then lets the reader go, which sees it as well."""
        num_ahead = 0
        while num_ahead < MAX_AHEAD:
            try:
                received = bytes(await self._read(CHUNK))
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            if not received:
                self._protocol.connection = _Gone()  # pyright: ignore[reportAttributeAccessIssue]
                scope.cancel()
                return
            num_ahead += len(received)
            self._protocol.connection.receive_data(received)


def _take_nothing(received: bytes) -> None:
    del received


class _Gone:
    """An h11 connection whose client has left: what came before is of no use, what is sent goes nowhere."""

    our_state = h11.ERROR
    their_state = h11.ERROR
    they_are_waiting_for_100_continue = False
    trailing_data = (b"", True)

    receive_data: Callable[[bytes], None] = staticmethod(_take_nothing)

    def next_event(self) -> h11.ConnectionClosed:
        return h11.ConnectionClosed()

    def send(self, event: object) -> bytes:
        """Sends nothing."""
        del event
        return b""


def _owner(method: object) -> Any:  # Any: whatever object a method belongs to; each is looked at
    return getattr(method, "__self__", None)


def _reader_of(server: Any) -> Read | None:  # Any: Hypercorn's TCPServer on asyncio, or the one on trio
    reader, stream = getattr(server, "reader", None), getattr(server, "stream", None)
    if callable(getattr(reader, "read", None)):
        return server.reader.read
    return server.stream.receive_some if callable(getattr(stream, "receive_some", None)) else None
