"""A request through ASGI whose client may leave at any time."""

import json
from collections.abc import Sequence
from typing import Any

import anyio

from tests.http.serving import ANSWER_S, Served


class AsgiCall:
    """One request on a connection of its own, which the client may leave at any time."""

    def __init__(
        self, served: Served, path: str, body: object, *, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.status: int | None = None
        self.chunks: list[bytes] = []
        self.has_ended = anyio.Event()
        content = json.dumps(body).encode()
        self._scope: dict[str, Any] = {  # Any: ASGI's
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "client": ("test", 1),
            "server": ("test", 80),
            "extensions": {},
        }
        self._events: list[dict[str, Any]] = [{"type": "http.request", "body": content, "more_body": False}]
        self._left = anyio.Event()
        self._news = anyio.Event()
        served.tasks.start_soon(self._run, served.app)

    async def until_chunks(self, num_chunks: int) -> None:
        """Waits until so many chunks have come."""
        with anyio.fail_after(ANSWER_S):
            while len(self.chunks) < num_chunks:
                assert not self.has_ended.is_set(), f"ended after {len(self.chunks)} chunks"
                await self._news.wait()

    def leave(self) -> None:
        """Closes the connection, as a client that has seen enough does."""
        self._left.set()

    async def ended(self) -> bytes:
        """Waits until the app is done with it; gives the body."""
        with anyio.fail_after(ANSWER_S):
            await self.has_ended.wait()
        return b"".join(self.chunks)

    async def _run(self, app: Any) -> None:  # Any: an ASGI app
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self._wake()
            self.has_ended.set()

    async def _receive(self) -> dict[str, Any]:
        if self._events:
            return self._events.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        if event["type"] == "http.response.start":
            self.status = event["status"]
        elif event.get("body"):
            self.chunks.append(event["body"])
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()
