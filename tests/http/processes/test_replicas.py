"""The front ends of a server: one that dies is replaced, and what can't start says so."""

import os
import signal
import socket

import anyio
import pytest

from megallm.core_async.engine import Engine
from megallm.http.processes.replicas import MAX_STARTS, FrontendFailedError, Replicas
from tests.engines import fake_runner
from tests.fakes import FakeTokenizer, continuation
from tests.http.loopback import eventually
from tests.http.sites import ANSWER_S, LONG, site

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_front_end_that_is_killed_is_replaced_and_its_requests_are_aborted() -> None:
    """The kernel kills what takes too much memory; the others' clients notice nothing."""
    async with site(1, step_s=0.002) as here:
        (first,) = here.server.pids
        client = await here.stream([1], 4000)
        os.kill(first, signal.SIGKILL)
        await client.read_to_end()
        await eventually(lambda: here.engine.stats().running == 0)
        assert await here.complete([7], 20) == continuation([7], 20)  # the port kept listening meanwhile
        (second,) = here.server.pids
        assert second != first


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_front_ends_that_end_as_soon_as_they_start_are_given_up(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A broken installation must be an error at the call, and no loop of processes that start and die."""
    engine = Engine(LONG, fake_runner(LONG), FakeTokenizer())
    listener = socket.create_server(("127.0.0.1", 0))
    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks:
            await tasks.start(engine.run)
            replicas = Replicas(engine, listener, 1, b"\x01", lambda _: None)
            with pytest.raises(FrontendFailedError, match=f"{MAX_STARTS} front ends in a row ended"):
                await tasks.start(replicas.run)
            await engine.shutdown()
    assert "ValidationError" in capfd.readouterr().err
    assert listener.fileno() == -1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_drain_does_not_wait_for_a_front_end_that_is_starting() -> None:
    """It has nothing under way."""
    engine = Engine(LONG, fake_runner(LONG), FakeTokenizer())
    listener = socket.create_server(("127.0.0.1", 0))
    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks:
            await tasks.start(engine.run)
            replicas = Replicas(engine, listener, 1, b"", lambda _: None)
            tasks.start_soon(replicas.run)
            await eventually(lambda: replicas.pids)
            replicas.begin_drain(1000.0)
            await eventually(lambda: not replicas.pids)
            await engine.shutdown()
