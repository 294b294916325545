"""A supervisor that is cancelled: the same order, no false failure, and nobody left."""

import asyncio

import anyio
import pytest

from megallm.core_async.kit.supervisor import Supervisor
from tests.checkpoints import AtAwait
from tests.kit.children import STARTED, STOPPED, Child, Counter, Pump, start_all, three, turns

pytestmark = pytest.mark.anyio


async def test_a_cancel_from_outside_stops_in_order_too() -> None:
    """A timeout round the whole engine is its usual end in somebody's test."""
    log, children = three()
    supervisor = Supervisor()
    with anyio.CancelScope() as scope:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert supervisor.failure is None
    assert log == STOPPED


@pytest.mark.parametrize("num_turns", range(10))
async def test_a_cancel_from_outside_is_never_taken_for_a_failure(num_turns: int) -> None:
    """If all were cancelled at once, one that is about to ask would find the other gone, and fail of it."""
    counter = Counter()
    failures: list[Exception] = []
    supervisor = Supervisor(failures.append)
    with anyio.CancelScope() as scope:
        async with supervisor:
            await supervisor.start("counter", counter.run)
            await supervisor.start("pump", Pump(counter.address).run)
            await turns(num_turns)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert failures == []


@pytest.mark.parametrize("nth", range(1, 12))
async def test_a_cancel_while_starting_leaves_nobody(nth: int) -> None:
    """Also a child that is not ready yet is stopped, and before those that were started before it."""
    log, children = three()
    num_started = 0
    supervisor = Supervisor()
    with anyio.CancelScope() as scope:
        async with supervisor:
            for child in children:
                await AtAwait(nth, supervisor.start(child.name, child.run), scope.cancel)
                num_started += 1
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert supervisor.failure is None
    ended = [line for line in log if line.endswith("ended")]
    begun = len(ended)
    assert ended == STOPPED[3 - begun :]
    assert begun >= num_started


async def test_a_failure_during_a_cancel_comes_out_as_it_is() -> None:
    """A cancel does not hide what broke while it was carried out."""
    _, children = three()
    children[0].stop_error = ValueError("on stop")
    supervisor = Supervisor()

    async def block() -> None:
        with anyio.CancelScope() as scope:
            async with supervisor:
                await start_all(supervisor, children)
                scope.cancel()
                await anyio.sleep_forever()

    with pytest.raises(ValueError, match="on stop"):
        await block()


async def run_under(supervisor: Supervisor, children: list[Child]) -> None:
    """Keeps children running."""
    async with supervisor:
        await start_all(supervisor, children)
        await anyio.sleep_forever()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("num_turns", range(6))
async def test_cancels_of_asyncios_own_leave_nobody(num_turns: int) -> None:
    """`asyncio.timeout` and a second Ctrl-C know no scopes and no shields; children must not outlive them."""
    log, children = three()
    task = asyncio.create_task(run_under(Supervisor(), children))
    while log != STARTED:
        await turns(1)
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await turns(num_turns)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(log[3:]) == sorted(STOPPED)
