"""Actors that crash or are cancelled: what becomes of every message and every ask."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.actor import Address
from megallm.core_async.messages import Ask
from tests.askers import Outcomes
from tests.checkpoints import AtAwait
from tests.kit.small_actors import Asker, Crash, Double, Forever, Message, Worker, turns

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("num_turns", [0, 2])
async def test_a_crash_fails_the_ask_in_hand_and_those_that_wait(num_turns: int) -> None:
    """An ask without an answer waits for ever, also in a task group that the crash does not reach."""
    worker = Worker()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        await outcomes.ask(outside, worker.address, Double(1))
        await outcomes.ask(outside, worker.address, Crash(num_turns))
        await outcomes.ask(outside, worker.address, Double(2))
        worker.address.tell(Double(3))
        with pytest.raises(ValueError, match="broken") as crash:
            await worker.run()
        await anyio.wait_all_tasks_blocked()
        assert outcomes.errors[0].__cause__ is crash.value
    assert outcomes.values == [2]
    assert [str(error) for error in outcomes.errors] == ["worker failed: ValueError('broken')"] * 2
    assert outcomes.errors[0] is not outcomes.errors[1], "each is raised in a task of its own"
    assert worker.handled == [Double(1)]


async def test_an_actor_that_is_gone_says_so_at_once() -> None:
    """A message to nobody must not wait until the caller's patience ends."""
    worker = Worker()
    worker.address.tell(Crash())
    with pytest.raises(ValueError, match="broken") as crash:
        await worker.run()
    for _ in range(2):
        with pytest.raises(ActorGone, match="worker failed") as gone:
            worker.address.tell(Double(1))
        assert gone.value.__cause__ is crash.value
        with pytest.raises(ActorGone, match="worker failed"):
            await worker.address.ask(Double(1))


async def test_a_cancelled_actor_fails_what_it_has_not_answered() -> None:
    """A stop is no failure, and the askers hear of it all the same."""
    worker = Worker()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        await outcomes.ask(outside, worker.address, Forever())
        await outcomes.ask(outside, worker.address, Double(1))
        async with anyio.create_task_group() as tasks:
            await tasks.start(worker.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert [str(error) for error in outcomes.errors] == ["worker has stopped"] * 2
    assert [error.__cause__ for error in outcomes.errors] == [None, None]


async def test_an_actor_cancelled_before_its_first_step_fails_its_asks() -> None:
    """A start that was cut short has askers too."""
    worker = Worker()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        await outcomes.ask(outside, worker.address, Double(1, num_turns=1))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await worker.run()
    assert [str(error) for error in outcomes.errors] == ["worker has stopped"]


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_no_ask_hangs_wherever_the_actor_is_cancelled(nth: int, kind: str, anyio_backend: str) -> None:
    """The contract holds at each await, also for a cancel that came from asyncio and not from a scope."""
    if kind == "native" and anyio_backend == "trio":
        kind = "scope"  # trio knows no other
    worker = Worker()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        for value in range(3):
            await outcomes.ask(outside, worker.address, Double(value, num_turns=value))
        with anyio.CancelScope() as scope:
            cancel = scope.cancel if kind == "scope" else cancel_natively()
            outside.start_soon(ask_later, outcomes, outside, worker.address, scope)
            try:
                await AtAwait(nth, worker.run(), cancel)
            except asyncio.CancelledError:
                if kind == "scope":
                    raise
                uncancel()
    assert len(outcomes.values) + len(outcomes.errors) == 6
    answers = [2 * message.value for message in worker.handled if isinstance(message, Double)]
    assert outcomes.values == answers[: len(outcomes.values)]
    assert len(answers) - len(outcomes.values) <= 1


def cancel_natively() -> Callable[[], object]:
    """Gives what cancels the running asyncio task as `asyncio.timeout` would."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def uncancel() -> None:
    """Takes the cancel back, as `asyncio.timeout` does."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def ask_later(
    outcomes: Outcomes, tasks: TaskGroup, address: Address[Message], scope: anyio.CancelScope
) -> None:
    """Asks three times, a few turns of the loop apart, and ends an actor that was not cancelled before."""
    for value in range(3):
        await turns(2)
        await outcomes.ask(tasks, address, Double(value))
    await anyio.wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("message", [Forever(), Double(1, num_turns=3)])
async def test_an_actor_cancelled_while_it_asks_another_fails_its_own_asker(message: Ask[int]) -> None:
    """The chain of asks must break from the top, and the one below must not care."""
    worker = Worker()
    asker = Asker(worker.address, message)
    async with anyio.create_task_group() as below:
        await below.start(worker.run)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_gone, asker.address.ask, "asker has stopped")
            await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as scope:
                await AtAwait(1, asker.run(), scope.cancel)
        if isinstance(message, Double):
            assert await worker.address.ask(Double(5)) == 10
        below.cancel_scope.cancel()


async def expect_gone(ask: Callable[[Double], Awaitable[int]], match: str) -> None:
    """Asks, and expects that nobody answers."""
    with pytest.raises(ActorGone, match=match):
        await ask(Double(0))


async def test_an_actor_whose_own_ask_fails_crashes_and_says_why() -> None:
    """Whoever waits at the top of a chain sees the whole of it in the causes."""
    worker = Worker()
    asker = Asker(worker.address, Crash())
    async with anyio.create_task_group() as outside:
        outside.start_soon(expect_gone, asker.address.ask, "asker failed: ActorGone")
        await anyio.wait_all_tasks_blocked()
        outside.start_soon(expect_crash, worker)
        with pytest.raises(ActorGone, match="worker failed: ValueError"):
            await asker.run()


async def expect_crash(worker: Worker) -> None:
    """Runs a worker that breaks."""
    with pytest.raises(ValueError, match="broken"):
        await worker.run()
