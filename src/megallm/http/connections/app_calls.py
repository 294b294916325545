"""The application's side of a connection: one call of it a request, and the messages between.

Knows ASGI and Hypercorn's protocols; knows no socket.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

log = logging.getLogger(__name__)

MAX_MESSAGES: Final = 16
"""Pieces of a request's body that wait for the application."""
NO_BODY: Final = frozenset({204, 304})
"""Statuses of responses that have none."""

type Message = MutableMapping[str, Any]  # Any: what ASGI says
type Send = Callable[[Message], Awaitable[None]]


class AppCalls:
    """Runs the application for the protocol, one task a request, in the connection's task group."""

    def __init__(
        self, tasks: TaskGroup, app: ASGIFramework, write_piece: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """`write_piece` writes a piece of a chunked body to the client."""
        self._tasks = tasks
        self._app = app
        self._write_piece = write_piece

    async def spawn_app(
        self, _app: object, _config: Config, scope: MutableMapping[str, Any], send: Callable[..., Any]
    ) -> Send:  # Any: as Hypercorn's protocols have it
        """Starts a request; gives what its messages are handed to."""
        inbox = Inbox()
        self._tasks.start_soon(self._run, scope, inbox, send)
        return inbox.put

    def spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """Starts a task of the protocol's own."""
        self._tasks.start_soon(function, *args)

    async def _run(self, scope: MutableMapping[str, Any], inbox: "Inbox", send: Callable[..., Any]) -> None:
        response = Response(scope, send, self._write_piece)
        try:
            # the protocol makes the scope and the messages, Hypercorn's types of them are its own
            await self._app(scope, inbox.receive, response.send)  # pyright: ignore[reportArgumentType]
        except Exception:
            log.exception("the application failed")
        finally:
            inbox.close()
        await send(None)


class Response:
    """Takes a response from the application and hands it to the protocol.

    The pieces of a chunked body go to the socket directly: of the microseconds that a streamed token
    costs, the way through the protocol's layers would be a third.
    """

    def __init__(self, scope: Message, send: Send, write_piece: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._write_piece = write_piece
        self._may_be_chunked = scope.get("http_version") == "1.1" and scope.get("method") != "HEAD"
        self._is_chunked = False

    async def send(self, message: Message) -> None:
        """See ASGI."""
        if self._is_chunked and message.get("more_body") and message["type"] == "http.response.body":
            if piece := message.get("body"):
                await self._write_piece(piece)
            return
        await self._send(message)
        if message["type"] == "http.response.start":
            names = {bytes(name).lower() for name, _ in message.get("headers", ())}
            has_body = message["status"] not in NO_BODY
            is_framed = not names.isdisjoint({b"content-length", b"transfer-encoding"})
            self._is_chunked = self._may_be_chunked and has_body and not is_framed


class Inbox:
    """The messages of one request that the application has yet to take."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._changed = anyio.Event()
        self._is_closed = False

    async def put(self, message: Message) -> None:
        """Adds a message; waits while too many of the body are there, and the application runs."""
        while len(self._messages) >= MAX_MESSAGES and message["type"] == "http.request":
            if self._is_closed:
                return
            await self._changed.wait()
        self._messages.append(message)
        self._change()

    async def receive(self) -> Message:
        """Waits for the next message."""
        while not self._messages:
            await self._changed.wait()
        message = self._messages.popleft()
        self._change()
        return message

    def close(self) -> None:
        """Drops what comes from now on: the application has ended."""
        self._is_closed = True
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
