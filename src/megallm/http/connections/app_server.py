"""Serves one app on one listening socket, and drains it within a time that is kept in every case."""

import errno
import logging
import socket
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.connections.connection import Address, Connection, ServerContext

log = logging.getLogger(__name__)

CUT_S: Final = 1.0
"""For clients to read the last frame of what was cut at the end of a drain."""
ABORT_S: Final = 0.5
"""For the application to leave the connections that were aborted after that."""
KEEP_ALIVE_S: Final = 75.0
"""Longer than the pools of clients keep a connection, so that they are the ones to close it."""
MAX_LATE: Final = 256
"""Connections accepted when a drain begins; in the meantime others come, so there may be no last one."""
FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What accept() says when the process, or the machine, has no room for a connection."""


class Drainable(Protocol):
    """What is under way in the app; `http/traffic.py` is one."""

    def begin_drain(self) -> None: ...
    def cut(self) -> None: ...


def protocol_config(max_header_bytes: int) -> Config:
    """Gives Hypercorn's settings."""
    config = Config()
    config.h11_max_incomplete_size = max_header_bytes
    config.h2_max_header_list_size = max_header_bytes
    config.h2_max_concurrent_streams = 1024
    config.keep_alive_timeout = KEEP_ALIVE_S  # type: ignore[assignment] - seconds; any number will do
    config.keep_alive_max_requests = 1_000_000
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("megallm.http")
    return config


class AppServer:
    """Owns a listening socket and its connections, all of them tasks of `run`."""

    def __init__(
        self, app: ASGIFramework, listener: socket.socket, config: Config, traffic: Drainable
    ) -> None:
        listener.setblocking(False)
        self._app = app
        self._listener = listener
        self._config = config
        self._traffic = traffic
        self._context = ServerContext()
        self._connections: set[Connection] = set()
        self._one_ended = anyio.Event()
        self._accepting = anyio.CancelScope()
        self._has_accepted_all = anyio.Event()
        self._drain_asked = anyio.Event()
        self._grace = anyio.CancelScope()
        """Its deadline is that of the drain."""

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until it has drained. A cancel closes every connection at once."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._accept_all, tasks)
                task_status.started()
                await self._drain_asked.wait()
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            self._listener.close()

    def begin_drain(self, timeout_s: float) -> None:
        """Stops accepting, and gives what is under way so long; called again, the shorter time holds.

        After that each response ends with an error; what is left then is cut, and `run` has ended
        two seconds after the time at the latest.
        """
        self._grace.deadline = min(self._grace.deadline, anyio.current_time() + timeout_s)
        self._drain_asked.set()

    async def _drain(self) -> None:
        self._traffic.begin_drain()
        self._accepting.cancel()
        await self._context.terminated.set()
        for connection in self._connections:
            connection.drain()
        with self._grace:
            await self._wait_closed()
            return
        log.info("%d connections are open at the end of the drain; cutting them", len(self._connections))
        self._traffic.cut()
        with anyio.move_on_after(CUT_S):
            await self._wait_closed()
            return
        for connection in self._connections:
            connection.abort()
        with anyio.move_on_after(ABORT_S):
            await self._wait_closed()

    async def _wait_closed(self) -> None:
        await self._has_accepted_all.wait()
        while self._connections:
            await self._one_ended.wait()

    # ---- connections ---------------------------------------------------------------------------

    async def _accept_all(self, tasks: TaskGroup) -> None:
        """Accepts one connection a turn, so that processes that share the socket share the load."""
        with self._accepting:
            while True:
                await anyio.wait_readable(self._listener)
                await self._accept(tasks)
        for _ in range(MAX_LATE):  # whoever had connected by then is told, not cut off
            if not await self._accept(tasks):
                break
        anyio.notify_closing(self._listener)
        self._listener.close()
        self._has_accepted_all.set()

    async def _accept(self, tasks: TaskGroup) -> bool:
        """Accepts a connection if there is one; says whether there was."""
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:  # another process was faster
            return False
        except OSError as error:
            if error.errno in FULL:
                log.warning("no room for another connection: %s", error)
                await self._wait_for_room()
            return False  # else it is the connection that failed
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        addresses = _address(sock.family, address), _address(sock.family, sock.getsockname())
        connection = Connection(self._app, self._config, self._context, ByteStream(sock), addresses)
        self._connections.add(connection)
        tasks.start_soon(self._serve, connection)
        return True

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            ended, self._one_ended = self._one_ended, anyio.Event()
            ended.set()

    async def _wait_for_room(self) -> None:
        """Waits for one of our connections to end; where there is none, others hold the room."""
        if self._connections:
            await self._one_ended.wait()
        else:
            await anyio.sleep(0.1)


def _address(family: socket.AddressFamily, address: tuple[str, int]) -> Address:
    """Gives host and port; a unix socket has neither."""
    return (address[0], address[1]) if family in (socket.AF_INET, socket.AF_INET6) else None
