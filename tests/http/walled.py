"""An app with a key and bounds of a test's choosing, as a stranger on a socket sees it."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from msgspec import Struct

from megallm.core_async.config import EngineConfig
from megallm.http.connections.app_server import AppServer, protocol_config
from megallm.http.service import AppSettings, Bounds
from tests.http.loopback import Client
from tests.http.serving import Served, serving

KEY = "sk-of-the-owner"


class Reply(Struct, frozen=True):
    """What came back."""

    status: int
    head: str
    body: bytes


class Walled:
    """The server, and what is behind it."""

    def __init__(self, served: Served, port: int) -> None:
        self.served = served
        self.port = port
        self.key = KEY

    async def say(self, *parts: str | bytes) -> Reply:
        """Says something on a connection of its own, exactly as it is, and reads until the server ends it."""
        client = Client.connect(self.port)
        for part in parts:
            await client.send(part)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
        return Reply(int(head.split(b" ", 2)[1]), head.decode("latin1"), body)

    async def ask(
        self, method: str, target: str, *headers: str, body: bytes = b"", key: str | None = KEY
    ) -> Reply:
        """Makes a request whose target is exactly as given."""
        lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close", f"Content-Length: {len(body)}"]
        if not any(header.lower().startswith("host:") for header in headers):
            lines.append("Host: test")
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        return await self.say("\r\n".join([*lines, "", ""]).encode("latin1"), body)


@asynccontextmanager
async def walled(
    *,
    settings: AppSettings | None = None,
    bounds: Bounds | None = None,
    config: EngineConfig | None = None,
) -> AsyncGenerator[Walled]:
    """Serves an app; the standing oracle holds afterwards."""
    told = settings or AppSettings(model_name="fake", api_key=KEY, bounds=bounds or Bounds())
    async with serving(config, settings=told) as served:
        served.client.headers["Authorization"] = f"Bearer {told.api_key}"
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        server = AppServer(
            served.app, listener, protocol_config(told.bounds.max_header_bytes), served.traffic
        )  # type: ignore[arg-type] - Quart types ASGI by its own dicts
        await served.tasks.start(server.run)
        yield Walled(served, port)
