"""Engines that another rank's starts, calls and ends: those that follow its plans, and those of replicas."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec import Struct

from megallm.core_async.errors import EngineStoppedError
from megallm.core_async.plan.phases import Phase
from megallm.core_async.ranks.calls import Calls
from megallm.core_async.ranks.led import Led
from tests.engines import Rig
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import running_pair
from tests.ranks.in_process_replicas import running_fleet


class Two(Struct):
    """The rank that leads, and one that it leads."""

    leading: Rig
    led: Led[Any]  # Any: frames of either kind
    calls: Calls


@asynccontextmanager
async def plans() -> AsyncGenerator[Two]:
    """Runs a rank that follows another's plans."""
    async with running_pair() as pair:
        yield Two(pair.leading, pair.follower, pair.follower_calls)


@asynccontextmanager
async def replicas() -> AsyncGenerator[Two]:
    """Runs a replica that another rank routes requests to."""
    async with running_fleet() as fleet:
        yield Two(fleet.rig, fleet.others[0], fleet.calls[1])


type Running = Callable[[], AbstractAsyncContextManager[Two]]

pytestmark = [
    pytest.mark.anyio,
    EVERY_LOOP,
    pytest.mark.parametrize("running", [plans, replicas], ids=["plans", "replicas"]),
]


async def test_requests_are_refused_with_the_name_of_who_takes_them(running: Running) -> None:
    """They would get no output here."""
    async with running() as two:
        assert two.led.phase is Phase.RUNNING
        with pytest.raises(RuntimeError, match=r"rank \d runs what rank \d sends it, which takes requests"):
            await two.led.submit([two.leading.request([1])])
        with pytest.raises(RuntimeError, match=r"rank \d runs what rank \d sends it"):
            await two.led.queue([two.leading.request([1])])
        two.led.go_on()
        assert two.led.phase is Phase.RUNNING


async def test_a_call_in_flight_ends_with_the_rank_that_leads(running: Running) -> None:
    """Its program may end without making it."""
    errors: list[str] = []
    async with running() as two, anyio.create_task_group() as tasks:

        async def pause() -> None:
            with pytest.raises(EngineStoppedError) as stopped:
                await two.calls.pause()
            errors.append(str(stopped.value))

        tasks.start_soon(pause)
        await anyio.wait_all_tasks_blocked()
        await two.leading.engine.shutdown()
    assert errors == ["the engine was shut down"]


async def test_waiting_for_the_rank_that_leads_ends_with_it_and_may_be_repeated(running: Running) -> None:
    """The facade's shutdown is idempotent, and a process must not end before the others do."""
    async with running() as two, anyio.create_task_group() as tasks:
        tasks.start_soon(two.led.wait_for_leader)
        await anyio.wait_all_tasks_blocked()
        assert two.led.phase is Phase.RUNNING
        await two.leading.engine.shutdown()
    await two.led.wait_for_leader()
    await two.led.wait_for_shutdown()
    assert two.led.phase is Phase.STOPPED
    with pytest.raises(EngineStoppedError):
        await two.calls.pause()
