"""Load on a completions endpoint of this machine: `python -m benchmarks.online_load`.

Arguments are the port, the model's name, its vocabulary's size, and cases: `REQUESTS:CONCURRENCY:IN:OUT:s`,
streamed, or `:n`, whole; so many connections send one request after the other. Writes one JSON line a case.
A process of its own, so that it takes no time of the server's interpreter; plain sockets, so that it is not
the bottleneck itself.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final, Self

from msgspec import Struct

from benchmarks.load import SEED

EVENT: Final = b"data: {"
LAST_CHUNK: Final = b"0\r\n\r\n"
READ_BYTES: Final = 1 << 18
MILLI: Final = 1e3


class LoadCase(Struct, frozen=True):
    """What is sent."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    is_streamed: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Gives the case of a text.

        Raises: ValueError naming the text and what it must be.
        """
        *numbers, kind = text.split(":")
        if len(numbers) != 4 or kind not in ("s", "n") or not all(map(str.isdecimal, numbers)):  # noqa: PLR2004 - as many as are named below
            raise ValueError(f"case is {text!r}; it must be REQUESTS:CONCURRENCY:IN:OUT:s, or :n at the end")
        return cls(*map(int, numbers), is_streamed=kind == "s")

    @property
    def name(self) -> str:
        """The text that it is the case of."""
        numbers = (self.num_requests, self.concurrency, self.prompt_tokens, self.output_tokens)
        return ":".join([*map(str, numbers), "s" if self.is_streamed else "n"])

    def bodies(self, model: str, vocab_size: int) -> Iterator[bytes]:
        """Yields the requests; no two prompts begin alike."""
        generator = random.Random(SEED)
        for _ in range(self.num_requests):
            body = {
                "model": model,
                "prompt": [generator.randrange(vocab_size) for _ in range(self.prompt_tokens)],
                "max_tokens": self.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": self.is_streamed,
            }
            yield json.dumps(body).encode()


class Times(Struct):
    """What the connections saw, in seconds."""

    first_s: list[float] = []
    """From each request to its first event; streams alone."""
    between_s: list[float] = []
    """From event to event."""
    whole_s: list[float] = []


async def run_case(port: int, case: LoadCase, model: str, vocab_size: int) -> dict[str, object]:
    """Sends a case's requests and gives its figures."""
    times, bodies = Times(), list(case.bodies(model, vocab_size))
    waiting = iter(bodies)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(case.concurrency, case.num_requests)):
            tasks.create_task(_send_in_turn(port, waiting, case, times))
    wall_s = time.perf_counter() - began
    figures: dict[str, object] = {
        "case": case.name,
        "requests_s": case.num_requests / wall_s,
        "output_tok_s": case.num_requests * case.output_tokens / wall_s,
        "latency_ms": _percentiles_ms(times.whole_s),
    }
    if case.is_streamed:
        figures |= {
            "ttft_ms": _percentiles_ms(times.first_s),
            "itl_ms": _percentiles_ms(times.between_s),
            "num_events": len(times.first_s) + len(times.between_s),
        }
    return figures


async def _send_in_turn(port: int, bodies: Iterator[bytes], case: LoadCase, times: Times) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    try:
        for body in bodies:
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            began = time.perf_counter()
            writer.write(head.encode() + body)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not headers.startswith(b"http/1.1 200"):
                raise RuntimeError(f"the server answered {headers[:200]!r} {await reader.read(500)!r}")
            if case.is_streamed:
                await _read_events(reader, began, times)
            else:
                _check_usage(await _read_whole(reader, headers), case)
            times.whole_s.append(time.perf_counter() - began)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, began: float, times: Times) -> None:
    """Reads a chunked body to its end; several events that come at once came at the same time."""
    rest, last = b"", None
    while True:
        some = await reader.read(READ_BYTES)
        if not some:
            raise RuntimeError(f"the server ended a stream early, after {rest!r}")
        now = time.perf_counter()
        text = rest + some
        for _ in range(text.count(EVENT)):
            if last is None:
                times.first_s.append(now - began)
            else:
                times.between_s.append(now - last)
            last = now
        if text.endswith(LAST_CHUNK):
            return
        # what may be the begin of an event or of the end
        rest = text[max(text.rfind(EVENT) + len(EVENT), len(text) - len(EVENT)) :]


async def _read_whole(reader: asyncio.StreamReader, headers: bytes) -> bytes:
    _, found, after = headers.partition(b"content-length:")
    if found:
        return await reader.readexactly(int(after.split(b"\r\n", 1)[0]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


def _check_usage(body: bytes, case: LoadCase) -> None:
    count = json.loads(body)["usage"]["completion_tokens"]
    if count != case.output_tokens:
        raise RuntimeError(f"the server gave {count} tokens, {case.output_tokens} were asked for")


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{rank}": ordered[len(ordered) * rank // 100] * MILLI for rank in (50, 99) if ordered}


async def _run_all(port: int, cases: Sequence[LoadCase], model: str, vocab_size: int) -> None:
    for case in cases:
        print(json.dumps(await run_case(port, case, model, vocab_size)), flush=True)


if __name__ == "__main__":
    _, port, model, vocab_size, *cases = sys.argv
    asyncio.run(_run_all(int(port), [LoadCase.parse(case) for case in cases], model, int(vocab_size)))
