"""Clients that stop reading: they cost the others nothing, the server little, and its end no time."""

import json
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio
import pytest

from megallm.core_async.transport.byte_stream import ByteStream
from tests.engines import engine_config
from tests.http.serving import eventually, expected_tokens, frames_of, strict_json
from tests.http.sites import Site, greedy
from tests.http.talking import KEY, talking

pytestmark = pytest.mark.anyio

NUM_STUCK: Final = 50
NUM_TOKENS: Final = 250
"""Of a stuck client's answer: many times what the buffers of its socket hold."""
CONFIG: Final = engine_config(num_blocks=16384, max_requests=64, max_tokens=1024, max_sequence_length=4096)
END_S: Final = 2.0
"""What a server may take beside the time of its drain, on a machine with nothing else to do."""


@contextmanager
def narrow() -> Generator[socket.socket]:
    """Gives a bound socket whose connections hold little that has not been read."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.bind(("127.0.0.1", 0))
        yield sock


class Stuck:
    """A client that asks for a stream and reads nothing of it."""

    def __init__(self, port: int, number: int, num_tokens: int) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        self.prompt = [number, 1]
        self.stream = ByteStream(sock)
        body = json.dumps(greedy(self.prompt, num_tokens) | {"stream": True, "return_token_ids": True})
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )

    async def ask(self) -> None:
        """Sends the request."""
        await self.stream.send(self._request.encode())

    async def read(self) -> list[bytes]:
        """Reads after all; gives what the frames hold."""
        received = bytearray()
        while chunk := await self.stream.receive():
            received += chunk
        return frames_of(unchunked(bytes(received).partition(b"\r\n\r\n")[2]))


def unchunked(body: bytes) -> bytes:
    """Gives a body that was sent in chunks."""
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


@asynccontextmanager
async def stuck(here: Site, num_tokens: int) -> AsyncGenerator[list[Stuck]]:
    """Has all of them ask; each is at work in the block."""
    clients = [Stuck(here.server.port, number, num_tokens) for number in range(NUM_STUCK)]
    try:
        for client in clients:
            await client.ask()
        await eventually(lambda: here.engine.stats().running == NUM_STUCK)
        yield clients
    finally:
        for client in clients:
            client.stream.close()


async def test_the_others_get_a_token_each_step_while_50_clients_read_nothing() -> None:
    """One reader that holds up the batch holds up everybody."""
    with narrow() as sock:
        async with talking(config=CONFIG, sock=sock) as talk, stuck(talk.here, 4000):
            here, num_tokens = talk.here, 100
            begin = here.engine.stats().step
            async with anyio.create_task_group() as tasks:
                for number in range(5):
                    tasks.start_soon(expect_stream, here, [number, 2], num_tokens)
            assert here.engine.stats().step - begin <= num_tokens + 30
            assert here.engine.stats().running == NUM_STUCK


async def expect_stream(here: Site, prompt: list[int], num_tokens: int) -> None:
    """Fails unless a stream that is read brings every token."""
    body = greedy(prompt, num_tokens) | {"stream": True, "return_token_ids": True}
    response = await here.client.post("/v1/completions", json=body)
    assert tokens_of(frames_of(response.content)) == expected_tokens(prompt, num_tokens)


def tokens_of(frames: list[bytes]) -> list[int]:
    """Gives the tokens of a whole stream."""
    assert frames[-1] == b"[DONE]"
    choices = [strict_json(each)["choices"][0] for each in frames[:-1]]
    return [token for choice in choices for token in choice.get("token_ids", ())]


async def test_what_nobody_reads_is_kept_as_tokens_and_comes_in_few_chunks() -> None:
    """A chunk a token is some 300 bytes; 50 long answers of them would be much, and a queue of them more."""
    with narrow() as sock:
        async with talking(config=CONFIG, sock=sock) as talk, stuck(talk.here, NUM_TOKENS) as clients:
            await eventually(lambda: talk.here.engine.stats().running == 0)
            frames: dict[int, list[bytes]] = {}

            async def read(number: int) -> None:
                frames[number] = await clients[number].read()

            async with anyio.create_task_group() as tasks:
                for number in range(NUM_STUCK):
                    tasks.start_soon(read, number)
            for number, client in enumerate(clients):
                assert tokens_of(frames[number]) == expected_tokens(client.prompt, NUM_TOKENS)
                assert len(frames[number]) < NUM_TOKENS / 2


async def test_a_stop_takes_its_time_and_no_more_with_50_clients_that_read_nothing() -> None:
    """Seen as a process that had to be killed: it waited for a write that never ended."""
    with narrow() as sock:
        async with talking(config=CONFIG, sock=sock, checks_end=False) as talk, stuck(talk.here, 4000):
            await expect_end(talk.here)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_stop_takes_no_more_time_behind_front_ends_either() -> None:
    """Those that do not end by themselves are killed."""
    with narrow() as sock:
        async with talking(2, config=CONFIG, sock=sock, checks_end=False) as talk, stuck(talk.here, 4000):
            await expect_end(talk.here)
            assert talk.here.server.pids == set()


async def expect_end(here: Site) -> None:
    """Fails unless the server ends in its time, and the engine then has nothing to do."""
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    here.server.begin_stop(0.2)
    with anyio.fail_after(0.2 + END_S * busy):
        await here.has_ended.wait()
    await eventually(lambda: not here.engine.stats().running)
