"""An app behind a real Hypercorn on a loopback port, for what only sockets show."""

import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import hypercorn.asyncio
import hypercorn.trio
import sniffio
from anyio.abc import SocketStream
from hypercorn.config import Config

from tests.http.serving import Served, serving, serving_config


@asynccontextmanager
async def serving_on_port() -> AsyncGenerator[tuple[Served, int]]:
    """Runs an app for long answers behind Hypercorn, and gives it with its port."""
    config = serving_config(num_blocks=2048, max_sequence_length=4096)
    async with serving(config) as served, listening(served) as port:
        yield served, port


@asynccontextmanager
async def listening(served: Served) -> AsyncGenerator[int]:
    """Serves an app and gives the port; stops at once afterwards."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = 0.1
    config.errorlog = None
    # Any: Hypercorn types apps by its own dicts
    hypercorn_of_loop: Any = (
        hypercorn.trio if sniffio.current_async_library() == "trio" else hypercorn.asyncio
    )
    stop = anyio.Event()

    async def run() -> None:
        await hypercorn_of_loop.serve(served.app, config, shutdown_trigger=stop.wait)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            yield port
        finally:
            stop.set()


def request_bytes(path: str, body: dict[str, Any], *, method: str = "POST") -> bytes:  # Any: JSON
    """Gives a request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def connect(port: int) -> SocketStream:
    """Opens a connection."""
    return await anyio.connect_tcp("127.0.0.1", port)


async def read_until(stream: SocketStream, end: bytes) -> bytes:
    """Reads until some bytes have come."""
    received = b""
    with anyio.fail_after(10):
        while end not in received:
            received += await stream.receive()
    return received
