"""Clients of an OpenAI server: many streams at once, or requests one after the other, and their times.

A process of its own, so that what it costs is not counted as the server's: `python -m
benchmarks.http_load` prints one JSON object. It parses nothing that it need not.
"""

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, cast

from msgspec import Struct
from msgspec import json as msgspec_json

PROMPT: Final = [1] * 32
FIRST: Final = b"data:"
"""Of a stream's body; it may come with the head, or behind it."""
END: Final = b"0\r\n\r\n"
"""Of a chunked response."""


class Times(Struct):
    """What the clients saw."""

    wall_s: float
    num_requests: int
    num_tokens: int
    first_token_ms: dict[str, float]
    """Percentiles over the requests."""
    between_ms: dict[str, float]
    """Percentiles over the writes that a stream came in, from one to the next."""
    num_writes: int


class Connection(asyncio.BufferedProtocol):
    """One connection: sends a request when told, and notes when bytes come."""

    def __init__(self) -> None:
        self._buffer = bytearray(2**16)
        self._came = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.times: list[float] = []
        """When bytes of a stream's body came, each time; of another response, the last time alone."""
        self._is_chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # cast: uvloop's has another base

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - as asyncio has it
        """See asyncio."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        now = time.perf_counter()
        last = bytes(self._buffer[:nbytes])
        self._came += last
        if not self._is_chunked:
            self.times = [now]
        elif self.times or FIRST in self._came:
            self.times.append(now)
        if self._waiter is not None and self._is_whole(last):
            self._waiter.set_result(None)
            self._waiter = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._waiter is not None:
            self._waiter.set_exception(exc or ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes, *, is_streamed: bool) -> bytes:
        """Sends a request and waits for its whole response."""
        assert self._transport is not None
        self._came.clear()
        self.times.clear()
        self._is_chunked = is_streamed
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._waiter
        return bytes(self._came)

    def close(self) -> None:
        """Leaves."""
        assert self._transport is not None
        self._transport.close()

    def _is_whole(self, last: bytes) -> bool:
        if self._is_chunked:
            return last.endswith(END)
        head, mark, body = self._came.partition(b"\r\n\r\n")
        if not mark:
            return False
        _, _, length = head.lower().partition(b"content-length:")
        return len(body) >= int(length.partition(b"\r\n")[0])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Gives the 50th, 90th and 99th percentile."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share / 100) - 1)]
        if ordered
        else 0.0
        for share in (50, 90, 99)
    }


async def load(port: int, num_clients: int, num_rounds: int, num_tokens: int, *, is_streamed: bool) -> Times:
    """Runs the clients side by side, each `num_rounds` requests; connects before the clock starts."""
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(num_clients)
    ]
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": is_streamed}
    text = json.dumps(body | {"temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    firsts: list[float] = []
    betweens: list[float] = []

    async def run(connection: Connection) -> None:
        for _ in range(num_rounds):
            began = time.perf_counter()
            answer = await connection.ask(head.encode() + text, is_streamed=is_streamed)
            assert b" 200 " in answer[:20], answer[:500]
            assert not is_streamed or b"[DONE]" in answer[-100:], answer[-500:]
            firsts.append((connection.times[0] - began) * 1e3)
            pairs = itertools.pairwise(connection.times)
            betweens.extend((later - earlier) * 1e3 for earlier, later in pairs)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for connection in connections:
            tasks.create_task(run(connection))
    wall_s = time.perf_counter() - began
    for connection in connections:
        connection.close()
    num_requests = num_clients * num_rounds
    return Times(
        wall_s,
        num_requests,
        num_requests * num_tokens,
        percentiles(firsts),
        percentiles(betweens),
        len(betweens),
    )


def main(argv: Sequence[str]) -> int:
    """Runs the clients and prints what they saw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_load", description=__doc__)
    for name in ("port", "clients", "rounds", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    work = load(options.port, options.clients, options.rounds, options.tokens, is_streamed=options.stream)
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop  # noqa: PLC0415 - an extra

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        print(msgspec_json.encode(runner.run(work)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
