"""A connected stream socket on either event loop, with nothing between it and its user.

No transport and no buffer of its own: a write that the socket takes at once costs one system call
and no turn of the loop, and what the peer has not read holds the writer back at once.
"""

import contextlib
import socket
from typing import Final

import anyio

MAX_READ: Final = 256 * 1024
"""Bytes of one read, where the reader does not say."""


class ByteStream:
    """Owns a connected socket. One task reads; one task, perhaps another, writes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._is_closed = False

    async def receive(self, max_bytes: int = MAX_READ) -> bytes:
        """Waits for bytes and gives what is there, so many at most; b"" at the end of the stream.

        A cancel loses nothing.
        Raises: OSError, and anyio.ClosedResourceError when it is closed meanwhile.
        """
        while True:
            if self._is_closed:
                raise anyio.ClosedResourceError
            await anyio.wait_readable(self._sock)
            try:
                return self._sock.recv(max_bytes)
            except BlockingIOError:
                continue

    def send_now(self, chunk: bytes | bytearray | memoryview) -> int:
        """Writes what the socket takes at once; gives how many bytes that was, perhaps none.

        Raises: OSError.
        """
        try:
            return self._sock.send(chunk)
        except BlockingIOError:
            return 0

    async def send(self, chunk: bytes | bytearray) -> None:
        """Writes everything; waits only while the socket takes no more. A cancel may leave it half written.

        Raises: OSError, and anyio.ClosedResourceError when it is closed meanwhile.
        """
        sent = self.send_now(chunk)
        if sent == len(chunk):
            return
        with memoryview(chunk) as rest:
            while sent < len(rest):
                await self.writable()
                sent += self.send_now(rest[sent:])

    async def writable(self) -> None:
        """Waits until the socket takes more.

        Raises: OSError, and anyio.ClosedResourceError when it is closed meanwhile.
        """
        if self._is_closed:
            raise anyio.ClosedResourceError
        await anyio.wait_writable(self._sock)

    def end(self) -> None:
        """Says that nothing more is written; the peer is at the end once it has read the rest."""
        with contextlib.suppress(OSError):  # the peer has gone
            self._sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Ends both directions at once: whoever reads is at the end, whoever writes gets an error."""
        with contextlib.suppress(OSError):  # the peer may have done so before
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; whoever waits for it gets anyio.ClosedResourceError. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            anyio.notify_closing(self._sock)
            self._sock.close()
