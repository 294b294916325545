"""Clients that leave at random moments, in every way there is to leave: nothing of theirs stays."""

import json
import random
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
import pytest

from megallm.core_async.transport.byte_stream import ByteStream
from tests.engines import engine_config
from tests.freed import open_descriptors
from tests.http.serving import eventually
from tests.http.sites import Site
from tests.http.talking import KEY, num_busy, talking

pytestmark = pytest.mark.anyio

NUM_CLIENTS: Final = 200
LAST_STEP: Final = 60
"""Clients leave before the engine has made so many steps; their answers take thousands."""
MAX_STEPS: Final = 100
"""What the engine may still do until it has heard of all of them."""
STRAY: Final = [b"", b"", b"\r\n", b"\0xyz", b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n", b"x" * 3000]
"""What some clients send after their body: nothing, an empty line, nonsense, a request more, a lot."""
WAYS: Final = ["close", "reset", "end"]
CONFIG: Final = engine_config(num_blocks=8192, max_requests=64, max_tokens=1024, max_sequence_length=4096)


class Leaver:
    """A client that says a request, or a part of it, and then leaves."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._stream = ByteStream(self._sock)
        self._request = request_of(dice)
        self._way = dice.choice(WAYS)
        self._presence = anyio.CancelScope()
        self.step = dice.randrange(LAST_STEP)
        """It leaves after this step of the engine."""

    async def run(self) -> None:
        """Says what it has to say, and reads what comes, until it leaves."""
        with self._presence, suppress(OSError):
            await self._stream.send(self._request)
            while await self._stream.receive():
                pass

    def leave(self) -> None:
        """Leaves orderly, or as one that has crashed, or keeps its ears open while it says no more."""
        match self._way:
            case "end":
                self._stream.end()
            case "reset":
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close()
            case _:
                self.close()

    def close(self) -> None:
        """Closes what is still open."""
        self._presence.cancel()
        self._stream.close()


def request_of(dice: random.Random) -> bytes:
    """Gives a request for a long answer, as a client says it; one in ten breaks off in the middle."""
    said = "".join(chr(dice.randrange(97, 123)) for _ in range(dice.randrange(1, 30)))
    body: dict[str, Any] = {  # Any: JSON
        "max_tokens": 4000,
        "ignore_eos": True,
        "temperature": 0,
        "stream": dice.random() < 0.5,
        "n": dice.choice([1, 1, 1, 2]),
    }
    is_chat = dice.random() < 0.5
    body |= {"messages": [{"role": "user", "content": said}]} if is_chat else {"prompt": said}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/{'chat/' * is_chat}completions HTTP/1.1\r\nHost: test\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    whole = head.encode() + content
    return whole[: dice.randrange(len(whole))] if dice.random() < 0.1 else whole + dice.choice(STRAY)


@asynccontextmanager
async def left(here: Site, seed: int) -> AsyncGenerator[None]:
    """Has all clients come and leave; in the block the last has just left."""
    dice = random.Random(seed)
    clients = [Leaver(here.server.port, dice) for _ in range(NUM_CLIENTS)]
    begin = here.engine.stats().step
    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.run)
        for client in sorted(clients, key=lambda each: each.step):
            await eventually(lambda wanted=begin + client.step: here.engine.stats().step >= wanted)
            client.leave()
        yield
        for client in clients:
            client.close()


def is_idle(here: Site) -> bool:
    """Whether the engine has nothing to do."""
    return not num_busy(here)


async def test_nothing_is_left_of_200_clients_that_leave_at_random_moments() -> None:
    """Blocks that stay are a cache that fills up; a task that stays is a leak, and so is a descriptor."""
    async with talking(config=CONFIG, step_s=0.001) as talk:
        here = talk.here
        num_tasks, descriptors = len(anyio.get_running_tasks()), open_descriptors()
        async with left(here, seed=1):
            step = here.engine.stats().step
            await eventually(lambda: is_idle(here))
            assert here.engine.stats().step - step <= MAX_STEPS
        await eventually(lambda: len(anyio.get_running_tasks()) <= num_tasks)
        await eventually(lambda: open_descriptors() <= descriptors)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_is_left_of_them_behind_a_front_end_either() -> None:
    """There the news has a socket more to go through."""
    async with talking(1, config=CONFIG, step_s=0.001) as talk:
        here = talk.here
        async with left(here, seed=2):
            step = here.engine.stats().step
            await eventually(lambda: is_idle(here))
            assert here.engine.stats().step - step <= 20 * MAX_STEPS  # with few requests they are fast


async def test_a_request_whose_end_comes_with_it_is_given_up() -> None:
    """Seen on trio: the connection had ended before its request began, which then nobody told."""
    async with talking(config=CONFIG, step_s=0.001) as talk:
        clients = [talk.here.connect() for _ in range(50)]
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True})
        head = f"authorization: Bearer {KEY}\nhost: x\ncontent-length: {len(body)}"
        for client in clients:
            await client.send(f"POST /v1/completions HTTP/1.1\n{head}\n\n{body}")
            client.end()
        for client in clients:
            assert b"200" not in await client.read_to_end()
        await eventually(lambda: is_idle(talk.here))
        assert talk.here.engine.stats().step <= MAX_STEPS
