"""Small applications on real sockets, and a client that says exactly what a test wants it to say."""

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from hypercorn.config import Config

from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.connections.app_server import AppServer, protocol_config
from megallm.http.connections.connection import Connection, ServerContext

ANSWER_S = 10.0
"""Longer than anything here takes, also on a busy machine."""

type Scope = dict[str, Any]  # Any: what ASGI says
type Receive = Callable[[], Awaitable[dict[str, Any]]]  # Any: the same
type Send = Callable[[dict[str, Any]], Awaitable[None]]  # Any: the same


class Client:
    """One end of a connection to a server."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._read = b""

    @classmethod
    def connect(cls, port: int) -> Self:
        """Connects to a port of this machine, which listens: no wait."""
        return cls(ByteStream(socket.create_connection(("127.0.0.1", port), ANSWER_S)))

    async def send(self, request: str | bytes) -> None:
        """Writes bytes, lines of a text ended as HTTP wants it."""
        text = request if isinstance(request, bytes) else request.replace("\n", "\r\n").encode()
        await self._stream.send(text)

    async def get(self, path: str) -> None:
        """Sends a whole request."""
        await self.send(f"GET {path} HTTP/1.1\nhost: test\n\n")

    async def read_until(self, mark: bytes) -> bytes:
        """Reads up to a mark; gives what came with it."""
        with anyio.fail_after(ANSWER_S):
            while mark not in self._read:
                chunk = await self._stream.receive()
                assert chunk, f"the end came, and no {mark!r}, after {self._read[-200:]!r}"
                self._read += chunk
        before, _, self._read = self._read.partition(mark)
        return before + mark

    async def read_to_end(self) -> bytes:
        """Reads until the server ends the connection, orderly or not, and closes it."""
        with anyio.fail_after(ANSWER_S):
            try:
                while chunk := await self._stream.receive():
                    self._read += chunk
            except ConnectionResetError:
                pass
            finally:
                self.close()
        read, self._read = self._read, b""
        return read

    def end(self) -> None:
        """Writes nothing more."""
        self._stream.end()

    def close(self) -> None:
        """Leaves."""
        self._stream.close()


class App:
    """An application that a test watches and holds.

    `/` answers; `/echo` gives the body back; `/hold` answers once `go` is set; `/stream` writes
    until `cut`; `/flood` writes more than any socket takes; `/fail` and `/fail-late` raise; `/deaf`
    answers and leaves the body unread.
    """

    def __init__(self) -> None:
        self.go = anyio.Event()
        self.entered = anyio.Event()
        self.left = anyio.Event()
        """Set when a held request hears that its client has gone."""
        self.is_draining = False
        self.was_cut = anyio.Event()
        self.num_calls = 0

    def begin_drain(self) -> None:
        """See Drainable."""
        self.is_draining = True

    def cut(self) -> None:
        """See Drainable."""
        self.was_cut.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        match scope["path"]:
            case "/echo":
                await answer(send, await body_of(receive))
            case "/hold":
                await self._hold(receive, send)
            case "/stream":
                await self._stream(send)
            case "/flood":
                await self._flood(receive, send)
            case "/fail":
                raise RuntimeError("broken on purpose")
            case "/fail-late":
                await start(send)
                await send({"type": "http.response.body", "body": b"part", "more_body": True})
                raise RuntimeError("broken on purpose")
            case path:
                if path != "/deaf":
                    await body_of(receive)
                await answer(send, f"{scope['method']} {path}".encode())

    async def _hold(self, receive: Receive, send: Send) -> None:
        await body_of(receive)
        async with anyio.create_task_group() as tasks:

            async def hear() -> None:
                assert (await receive())["type"] == "http.disconnect"
                self.left.set()
                tasks.cancel_scope.cancel()

            tasks.start_soon(hear)
            self.entered.set()
            await self.go.wait()
            await answer(send, b"held")
            tasks.cancel_scope.cancel()

    async def _stream(self, send: Send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await self.was_cut.wait()
        await send({"type": "http.response.body", "body": b"cut"})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await body_of(receive)
        await start(send)
        self.entered.set()
        async with anyio.create_task_group() as tasks:

            async def hear() -> None:
                await receive()
                self.left.set()
                tasks.cancel_scope.cancel()

            tasks.start_soon(hear)
            while True:
                await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})


async def eventually(holds: Callable[[], object]) -> None:
    """Waits for something that is on its way, within this process or from another."""
    with anyio.fail_after(ANSWER_S):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def body_of(receive: Receive) -> bytes:
    """Gives a request's body."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def start(send: Send, *headers: tuple[bytes, bytes]) -> None:
    """Starts a response."""
    await send({"type": "http.response.start", "status": 200, "headers": list(headers)})


async def answer(send: Send, body: bytes) -> None:
    """Gives a whole response."""
    await start(send, (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.body", "body": body})


def config(**settings: Any) -> Config:  # Any: of any type
    """Gives Hypercorn's settings, some of them otherwise."""
    made = protocol_config(max_header_bytes=4096)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


@asynccontextmanager
async def connected(app: App, **settings: Any) -> AsyncGenerator[tuple[Client, Connection]]:  # Any: config's
    """Serves one connection; ends it, and waits for its end, after the block."""
    ours, theirs = map(ByteStream, socket.socketpair())
    connection = Connection(app, config(**settings), ServerContext(), theirs, (None, None))  # type: ignore[arg-type] - dicts
    client = Client(ours)
    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            yield client, connection
            client.close()


class Rig:
    """A server of an app, and its port."""

    def __init__(self, app: App, listener: socket.socket, server: AppServer) -> None:
        self.app = app
        self.server = server
        self.port: int = listener.getsockname()[1]
        self.has_ended = anyio.Event()
        self._clients: list[Client] = []

    def connect(self) -> Client:
        """Gives a client, which is closed at the end."""
        self._clients.append(Client.connect(self.port))
        return self._clients[-1]

    def close(self) -> None:
        """Closes the clients."""
        for client in self._clients:
            client.close()


@asynccontextmanager
async def serving() -> AsyncGenerator[Rig]:
    """Serves an app on loopback; drains it after the block unless the test has."""
    app = App()
    listener = socket.create_server(("127.0.0.1", 0))
    server = AppServer(app, listener, config(), app)  # type: ignore[arg-type] - the same
    rig = Rig(app, listener, server)

    async def run() -> None:
        await server.run()
        rig.has_ended.set()

    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield rig
            finally:
                rig.close()
            server.begin_drain(0.0)
