"""The server of one app: it accepts, and it drains within its time whatever its clients do."""

import os
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import httpx
import pytest

from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.connections.app_server import ABORT_S, CUT_S
from megallm.http.connections.connection import LINGER_S
from tests.http.loopback import Client, eventually, serving

pytestmark = pytest.mark.anyio

SLACK_S = 0.4
"""What `run` may take beside the times it promises, within its two seconds."""


async def test_connections_are_served_side_by_side() -> None:
    """One long answer holds up nobody else."""
    async with serving() as rig:
        clients = [rig.connect() for _ in range(20)]
        await clients[0].get("/hold")
        await rig.app.entered.wait()
        for client in clients[1:]:
            await client.get("/")
        for client in clients[1:]:
            await client.read_until(b"GET /")
        assert rig.server.num_connections == 20
        rig.app.go.set()
        await clients[0].read_until(b"held")


async def test_http2_works_with_prior_knowledge() -> None:
    """Proxies speak it; several answers share one connection then, and none gets into another."""
    async with serving() as rig:
        bodies = [bytes([65 + index]) * 200_000 for index in range(4)]
        answers: dict[int, bytes] = {}
        url = f"http://127.0.0.1:{rig.port}/echo"
        async with httpx.AsyncClient(http1=False, http2=True) as client, anyio.create_task_group() as tasks:

            async def post(index: int) -> None:
                response = await client.post(url, content=bodies[index])
                answers[index] = response.content

            for index in range(len(bodies)):
                tasks.start_soon(post, index)
        assert [answers[index] for index in range(len(bodies))] == bodies
        assert rig.server.num_connections <= 1


async def test_a_drain_of_idle_connections_takes_no_time() -> None:
    """Clients keep their connections for minutes; nobody waits for that when a server is replaced."""
    async with serving() as rig:
        client = rig.connect()
        await client.get("/")
        await client.read_until(b"GET /")
        rig.server.begin_drain(1000.0)
        assert await client.read_to_end() == b""
        await rig.has_ended.wait()
        assert not rig.app.was_cut.is_set()
        with pytest.raises(ConnectionRefusedError):
            Client.connect(rig.port)


async def test_whoever_connects_and_says_nothing_holds_a_drain_for_a_second() -> None:
    """Pools connect ahead of need."""
    async with serving() as rig:
        client = rig.connect()
        await eventually(lambda: rig.server.num_connections == 1)
        rig.server.begin_drain(1000.0)
        with anyio.fail_after(LINGER_S + SLACK_S):
            assert await client.read_to_end() == b""
            await rig.has_ended.wait()


async def test_what_is_under_way_finishes_in_the_time_it_has() -> None:
    """An answer that needs two more seconds is worth two seconds."""
    async with serving() as rig:
        client = rig.connect()
        await client.get("/hold")
        await rig.app.entered.wait()
        rig.server.begin_drain(1000.0)
        await anyio.wait_all_tasks_blocked()
        assert rig.app.is_draining
        rig.app.go.set()
        assert (await client.read_to_end()).endswith(b"held")
        await rig.has_ended.wait()


async def test_whoever_had_connected_before_the_drain_is_answered() -> None:
    """A request that was sent in time gets an answer, be it 503, and no broken connection."""
    async with serving() as rig:
        accepted = rig.connect()
        await eventually(lambda: rig.server.num_connections == 1)
        waiting = [accepted, *(rig.connect() for _ in range(5))]
        rig.server.begin_drain(1000.0)
        for client in waiting:
            await client.get("/")
        for client in waiting:
            assert b"GET /" in await client.read_to_end()
        await rig.has_ended.wait()


async def test_a_stream_that_does_not_end_is_cut_with_a_last_word() -> None:
    """Its reader must learn that there would have been more."""
    async with serving() as rig:
        client = rig.connect()
        await client.get("/stream")
        await client.read_until(b"begun")
        rig.server.begin_drain(0.05)
        assert b"cut" in await client.read_to_end()
        await rig.has_ended.wait()


async def test_a_second_word_shortens_the_drain() -> None:
    """The second Ctrl-C means it."""
    async with serving() as rig:
        client = rig.connect()
        await client.get("/stream")
        await client.read_until(b"begun")
        rig.server.begin_drain(1000.0)
        await anyio.wait_all_tasks_blocked()
        rig.server.begin_drain(0.0)
        rig.server.begin_drain(1000.0)
        assert b"cut" in await client.read_to_end()
        await rig.has_ended.wait()


async def test_a_client_that_does_not_read_can_not_hold_the_server() -> None:
    """It ends within two seconds of the drain's time; Hypercorn's own would wait for ever."""
    async with serving() as rig:
        stuck, slow = rig.connect(), rig.connect()
        await stuck.get("/flood")
        await slow.send("POST /echo HTTP/1.1\nhost: test\ncontent-length: 9\n\nhalf")
        await rig.app.entered.wait()
        rig.server.begin_drain(0.0)
        with anyio.fail_after(CUT_S + ABORT_S + SLACK_S):
            await rig.has_ended.wait()
        assert rig.app.left.is_set()
        assert await slow.read_to_end() == b""


async def test_a_cancel_closes_every_connection() -> None:
    """Whoever leaves the server's scope leaves no socket behind."""
    clients: list[Client] = []
    with anyio.CancelScope() as scope:
        async with serving() as rig:
            clients.append(Client.connect(rig.port))
            await clients[0].get("/hold")
            await rig.app.entered.wait()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert await clients[0].read_to_end() == b""


async def test_a_full_process_accepts_again_once_a_connection_has_ended() -> None:
    """At the limit of open files accept() fails, at once and again: the loop must not spin, nor give up."""
    async with serving() as rig:
        first, waiting = rig.connect(), socket.socket()
        await first.get("/")
        await first.read_until(b"GET /")
        with no_more_files():
            waiting.connect(("127.0.0.1", rig.port))
            second = Client(ByteStream(waiting))
            await second.get("/second")
            await anyio.wait_all_tasks_blocked()
            assert rig.server.num_connections == 1
            first.close()
            await second.read_until(b"GET /second")
        second.close()


@contextmanager
def no_more_files() -> Generator[None]:
    """Lets this process open no file more than it has open, while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
