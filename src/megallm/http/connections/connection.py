"""One HTTP connection: Hypercorn's protocol over a plain socket, the same on either event loop.

Hypercorn's own connections wait for the application before they read on, so that a client's leaving
goes unseen once it has sent a byte too many; on trio nothing can end a write to a client that has
stopped reading; and their tasks belong to nobody. What HTTP is stays Hypercorn's.
"""

import logging
from collections import deque
from math import inf
from typing import Final

import anyio
import h11
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.typing import ASGIFramework, ConnectionState

from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.connections.app_calls import AppCalls

log = logging.getLogger(__name__)

MAX_PENDING: Final = 256 * 1024
"""Bytes read ahead of the application; more are left in the socket, and with them the client's leaving."""
LINGER_S: Final = 1.0
"""How long a client that is still sending may take to read why it was refused, and one that has just
connected to say what it wants of a server that drains."""

type Address = tuple[str, int] | None


class LoopEvent:
    """An event that can be cleared, as Hypercorn's protocols want it."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    async def clear(self) -> None:
        """Makes it an event that has not happened."""
        self._event = anyio.Event()

    async def set(self) -> None:
        """Lets those who wait go on."""
        self._event.set()

    async def wait(self) -> None:
        """Waits for the event."""
        await self._event.wait()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set()


class ServerContext:
    """What the connections of one server share, as Hypercorn's protocols want it."""

    event_class = LoopEvent

    def __init__(self) -> None:
        self.terminate = LoopEvent()
        self.terminated = LoopEvent()
        """Set once the server drains: a connection ends with the response under way."""

    async def mark_request(self) -> None:
        """Counts nothing: the server serves as many as come."""

    @staticmethod
    async def sleep(wait: float) -> None:
        """Waits for so many seconds."""
        await anyio.sleep(wait)

    @staticmethod
    def time() -> float:
        """Gives the loop's time."""
        return anyio.current_time()


class Connection:
    """Owns one connection's socket and its tasks."""

    def __init__(
        self,
        app: ASGIFramework,
        config: Config,
        context: ServerContext,
        stream: ByteStream,
        addresses: tuple[Address, Address],
    ) -> None:
        """`addresses`: the client's and the server's."""
        self._app = app
        self._config = config
        self._context = context
        self._stream = stream
        self._client, self._server = addresses
        self._is_idle = True
        self._is_ending = False
        """Whether nothing more is to be written: the response was the last, or the peer has gone."""
        self._is_new = True
        """Whether it has had no request yet."""
        self._opened_s = anyio.current_time()
        limit_s = LINGER_S if context.terminated.is_set() else config.keep_alive_timeout
        self._reading = anyio.CancelScope(deadline=self._opened_s + limit_s)
        """Its deadline ends an idle connection."""
        self._feeding = anyio.CancelScope()
        self._has_fed = anyio.Event()
        """Set once nothing more is handed to the protocol."""
        self._pending: deque[bytes] = deque()
        self._num_pending = 0
        self._fed = anyio.Event()
        self._read = anyio.Event()
        self._unsent = bytearray()
        self._flushed = anyio.Event()

    async def run(self) -> None:
        """Serves the connection to its end. A cancel closes it."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._protocol = ProtocolWrapper(
                    self._app,  # type: ignore[arg-type] - handed on to `AppCalls`
                    self._config,
                    self._context,  # type: ignore[arg-type] - it has what the protocols use
                    AppCalls(tasks, self._app, self._write_piece),  # type: ignore[arg-type] - the same
                    ConnectionState({}),
                    False,  # no TLS
                    self._client,
                    self._server,
                    self._send,
                    "http/1.1",
                )
                await self._protocol.initiate()
                tasks.start_soon(self._feed)
                await self._read_on()
                self._feeding.cancel()
                await self._has_fed.wait()  # else a request may begin that is never told: test_disconnects.py
                await self._protocol.handle(Closed())
        except* Exception:
            log.exception("a connection failed")
        finally:
            self._stream.close()

    def drain(self) -> None:
        """Ends the connection if nothing is under way; otherwise the response under way is its last."""
        if self._is_idle:
            self._reading.deadline = self._opened_s + LINGER_S if self._is_new else -inf

    def abort(self) -> None:
        """Cuts the connection: a write that waits for the client fails, and the application hears of it."""
        self._is_ending = True
        self._stream.abort()
        self._reading.cancel()

    # ---- in ------------------------------------------------------------------------------------

    async def _read_on(self) -> None:
        """Reads until the client ends, or the connection has been idle for too long, or is to end."""
        with self._reading:
            try:
                while chunk := await self._stream.receive(self._config.h11_max_incomplete_size):
                    if self._is_ending:
                        continue
                    self._pending.append(chunk)
                    self._num_pending += len(chunk)
                    self._read.set()
                    while self._num_pending > MAX_PENDING:
                        self._fed = anyio.Event()
                        await self._fed.wait()
            except OSError:
                return

    async def _feed(self) -> None:
        """Hands what was read to the protocol, which waits where the application is slower."""
        try:
            with self._feeding:
                while True:
                    while not self._pending:
                        self._read = anyio.Event()
                        await self._read.wait()
                    chunk = self._pending.popleft()
                    self._num_pending -= len(chunk)
                    self._fed.set()
                    await self._protocol.handle(RawData(chunk))
        finally:
            self._has_fed.set()

    # ---- out -----------------------------------------------------------------------------------

    async def _send(self, event: Event) -> None:
        """Does what the protocol says."""
        match event:
            case RawData(data):
                await self._write(data)
            case Updated(idle):
                self._is_idle = idle
                self._is_new = False
                is_over = idle and self._context.terminated.is_set()
                limit_s = 0.0 if is_over else self._config.keep_alive_timeout
                self._reading.deadline = anyio.current_time() + limit_s if idle else inf
            case _:
                self._end()

    async def _write_piece(self, piece: bytes) -> None:
        """Writes a piece of a chunked body, past the protocol, whose state it does not change."""
        await self._write(b"%x\r\n%b\r\n" % (len(piece), piece))

    async def _write(self, chunk: bytes) -> None:
        """Writes in order, whoever writes; waits while the client does not read."""
        if self._is_ending:
            await anyio.lowlevel.checkpoint()  # whoever writes on and on is to be cancelled here
            return
        try:
            sent = 0 if self._unsent else self._stream.send_now(chunk)
        except OSError:
            await self._lose()
            return
        if sent == len(chunk):
            return
        if not self._unsent:
            self._flushed = anyio.Event()
            self._tasks.start_soon(self._flush)
        self._unsent += chunk[sent:]
        await self._flushed.wait()

    async def _flush(self) -> None:
        """Writes what the socket did not take at once; others may add to it meanwhile."""
        try:
            while self._unsent:
                chunk = bytes(self._unsent)
                await self._stream.send(chunk)
                del self._unsent[: len(chunk)]
        except OSError:
            await self._lose()
        finally:
            self._unsent.clear()
            self._flushed.set()

    async def _lose(self) -> None:
        """Notes that the client has gone, and tells the application."""
        self._is_ending = True
        self._reading.cancel()
        await self._protocol.handle(Closed())

    def _end(self) -> None:
        """Ends the connection after what was written; a client that is sending may read it first."""
        self._is_ending = True
        self._stream.end()
        connection = getattr(self._protocol.protocol, "connection", None)
        if getattr(connection, "their_state", None) in (h11.SEND_BODY, h11.ERROR):
            self._reading.deadline = anyio.current_time() + LINGER_S
        else:
            self._reading.cancel()
