"""Actors: what becomes of every message and every ask, whenever the actor crashes or is cancelled."""

import asyncio
import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import ClassVar

import anyio
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.actor import Actor, Address, Refusal
from megallm.core_async.messages import Ask
from tests.askers import Outcomes
from tests.checkpoints import AtAwait
from tests.freed import watch_error, without_collector

pytestmark = pytest.mark.anyio


class BusyError(Exception):
    """What a refused asker gets."""


class Double(Ask[int], frozen=True):
    """Answer with twice the value, after so many turns of the loop."""

    value: int
    num_turns: int = 0


class Refuse(Ask[int], frozen=True):
    """Answer with an error."""


class Crash(Ask[int], frozen=True):
    """Break, after so many turns of the loop."""

    num_turns: int = 0


class Forever(Ask[int], frozen=True):
    """Never answer."""


type Message = Double | Refuse | Crash | Forever


class Worker(Actor[Message]):
    """Does what it is told and keeps a list of it."""

    name: ClassVar[str] = "worker"
    capacity: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[Message] = []

    async def handle(self, message: Message) -> object:
        """See the messages."""
        match message:
            case Double(value, num_turns):
                await turns(num_turns)
                self.handled.append(message)
                return 2 * value
            case Refuse():
                raise Refusal(BusyError("busy"))
            case Crash(num_turns):
                await turns(num_turns)
                raise ValueError("broken")
            case Forever():
                return await anyio.sleep_forever()


class Asker(Actor[Double]):
    """Asks another actor in order to answer."""

    name: ClassVar[str] = "asker"
    capacity: ClassVar[int] = 4

    def __init__(self, worker: Address[Message], message: Ask[int]) -> None:
        super().__init__()
        self.worker = worker
        self.message = message

    async def handle(self, message: Double) -> object:
        """Passes the question on."""
        return await self.worker.ask(self.message)


async def turns(num_turns: int) -> None:
    """Lets the loop go round so many times."""
    for _ in range(num_turns):
        await anyio.lowlevel.checkpoint()


async def test_an_ask_is_answered_with_what_handle_returned() -> None:
    """The one thing an actor is for."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        assert await worker.address.ask(Double(4)) == 8
        assert await worker.address.ask(Double(5, num_turns=3)) == 10
        tasks.cancel_scope.cancel()


async def test_messages_are_handled_in_the_order_they_came() -> None:
    """Senders rely on it: a submission comes before the abort that takes it back."""
    worker = Worker()
    messages = [Double(1, num_turns=2), Double(2), Double(3)]
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        for message in messages:
            worker.address.tell(message)
        assert worker.handled == []
        assert await worker.address.ask(Double(4)) == 8
        tasks.cancel_scope.cancel()
    assert worker.handled == [*messages, Double(4)]


async def test_what_came_before_the_start_is_handled() -> None:
    """Whoever builds the actors may hand out addresses before the tasks run."""
    worker = Worker()
    worker.address.tell(Double(1))
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        assert await worker.address.ask(Double(2)) == 4
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(1), Double(2)]


async def test_a_refusal_answers_one_ask_and_the_actor_goes_on() -> None:
    """A full waiting list is the caller's matter, not the engine's end."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        with pytest.raises(BusyError, match="busy"):
            await worker.address.ask(Refuse())
        assert await worker.address.ask(Double(1)) == 2
        tasks.cancel_scope.cancel()


async def test_a_refused_asker_leaves_no_cycle() -> None:
    """Errors keep frames alive; under load thousands of refusals must go without the garbage collector."""
    worker = Worker()
    with without_collector():
        async with anyio.create_task_group() as tasks:
            await tasks.start(worker.run)
            watched = await watch_error(worker.address.ask(Refuse()), BusyError)
            assert watched() is None
            tasks.cancel_scope.cancel()


async def test_the_refusal_of_a_tell_is_a_crash() -> None:
    """Nobody would ever hear of it."""
    worker = Worker()
    worker.address.tell(Refuse())
    with pytest.raises(Refusal, match="busy"):
        await worker.run()


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


async def test_an_asker_that_is_cancelled_disturbs_nobody() -> None:
    """The message is handled all the same, and its answer, which nobody wants, is no error."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        with anyio.CancelScope() as scope:
            await AtAwait(1, worker.address.ask(Double(1, num_turns=3)), scope.cancel)
        assert scope.cancelled_caught
        assert await worker.address.ask(Double(2)) == 4
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(1, num_turns=3), Double(2)]


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


async def test_a_full_mailbox_fails_loudly_and_loses_nothing() -> None:
    """Backpressure lives at admission: who gets here with one message too many has lost count."""
    worker = Worker()
    for value in range(4):
        assert worker.address.room == 4 - value
        worker.address.tell(Double(value))
    with pytest.raises(AssertionError, match="mailbox of worker is full: 4 wait, Crash refused"):
        worker.address.tell(Crash())
    with pytest.raises(AssertionError, match="mailbox of worker is full: 4 wait, Double refused"):
        await worker.address.ask(Double(9))
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        await anyio.wait_all_tasks_blocked()
        assert worker.address.room == 4
        assert await worker.address.ask(Double(4)) == 8
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(value) for value in range(5)]


async def test_an_actor_that_never_ran_leaves_nothing_behind() -> None:
    """When one actor fails to start, those after it are dropped as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = Worker()
        worker.address.tell(Double(1))
        watched = weakref.ref(worker)
        del worker
        assert watched() is None
    assert caught == []
