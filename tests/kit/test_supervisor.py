"""The supervisor: starts in order, stops in reverse, one failure ends all, and one error comes out."""

import asyncio
from typing import ClassVar

import anyio
import pytest
from anyio.abc import TaskStatus

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.actor import Actor, Address
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import Ask
from tests.checkpoints import AtAwait

pytestmark = pytest.mark.anyio


class Child:
    """A task that writes its life down, and takes some turns of the loop for each part of it."""

    def __init__(self, name: str, log: list[str], *, num_turns: int = 2) -> None:
        self.name = name
        self.log = log
        self.num_turns = num_turns
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.error: Exception | None = None
        """What `fail` made it break of."""
        self._has_to_fail = anyio.Event()

    def fail(self, error: Exception) -> None:
        """Makes it break."""
        self.error = error
        self._has_to_fail.set()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Lives until cancelled."""
        try:
            await turns(self.num_turns)
            if self.start_error is not None:
                raise self.start_error
            self.log.append(f"{self.name} ready")
            task_status.started()
            await self._has_to_fail.wait()
            assert self.error is not None
            raise self.error
        finally:
            with anyio.CancelScope(shield=True):
                await turns(self.num_turns)
            self.log.append(f"{self.name} ended")
            if self.stop_error is not None:
                raise self.stop_error


class Count(Ask[int], frozen=True):
    """Answer with how often this was asked."""


class Counter(Actor[Count]):
    """Counts."""

    name: ClassVar[str] = "counter"
    capacity: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self.max = 1_000_000

    async def handle(self, message: Count) -> object:
        """See the message."""
        self.num += 1
        if self.num > self.max:
            raise ValueError("broken")
        return self.num


class Pump:
    """Asks another without end, as the engine's pump does."""

    def __init__(self, counter: Address[Count]) -> None:
        self.counter = counter

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Asks until cancelled."""
        task_status.started()
        while True:
            await self.counter.ask(Count())


async def turns(num_turns: int) -> None:
    """Lets the loop go round so many times."""
    for _ in range(num_turns):
        await anyio.lowlevel.checkpoint()


def three() -> tuple[list[str], list[Child]]:
    """Gives a log and three children that write to it."""
    log: list[str] = []
    return log, [Child(name, log) for name in ("a", "b", "c")]


async def start_all(supervisor: Supervisor, children: list[Child]) -> None:
    """Starts children in order."""
    for child in children:
        await supervisor.start(child.name, child.run)


STARTED = ["a ready", "b ready", "c ready"]
STOPPED = ["c ended", "b ended", "a ended"]


async def test_children_start_in_order_and_each_is_ready_before_the_next() -> None:
    """Whoever is asked must be there before whoever asks."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        assert log == STARTED


async def test_they_stop_in_the_opposite_order_and_each_has_ended_before_the_next() -> None:
    """Whoever asks must be gone before whoever is asked."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
        await supervisor.stop()
        assert log == STOPPED
        await supervisor.stop()
    assert log == STOPPED
    assert supervisor.failure is None


async def test_two_stops_at_once_stop_each_child_once() -> None:
    """A shutdown may come from two places."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.stop)
            tasks.start_soon(supervisor.stop)
        assert log == STOPPED


async def test_leaving_the_block_stops_in_order_too() -> None:
    """The order must not depend on how the end came."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
    assert log == STOPPED


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


async def test_a_failure_ends_all_in_order_and_comes_out_as_it_is() -> None:
    """The caller sees one error, the first, and not a group; its cause is kept."""
    log, children = three()
    failures: list[Exception] = []
    error = ValueError("broken")
    error.__cause__ = KeyError("why")
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            children[1].fail(error)
            await anyio.sleep_forever()

    with pytest.raises(ValueError, match="broken") as caught:
        await block()
    assert log == ["b ended", "c ended", "a ended"]
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert failures == [error]
    assert supervisor.failure is error


async def test_failures_that_follow_from_the_first_are_not_reported() -> None:
    """One that asks the failed one fails as well, with an error that says less."""
    counter = Counter()
    counter.max = 3
    between = Child("between", [])
    between.stop_error = KeyError("on stop")
    failures: list[Exception] = []
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await supervisor.start("counter", counter.run)
            await supervisor.start("between", between.run)
            await supervisor.start("pump", Pump(counter.address).run)
            await anyio.sleep_forever()

    with pytest.raises(ValueError, match="broken"):
        await block()
    assert [type(failure) for failure in failures] == [ValueError]


async def test_a_failure_while_stopping_is_raised() -> None:
    """A model that could not be given back must not go unnoticed, and the others stop all the same."""
    log, children = three()
    children[1].stop_error = ValueError("on stop")
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            await supervisor.stop()

    with pytest.raises(ValueError, match="on stop"):
        await block()
    assert log == STOPPED


async def test_a_failing_start_stops_those_before_it_and_comes_out_as_it_is() -> None:
    """An engine that can't start leaves nothing running, and says why."""
    log, children = three()
    children[2].start_error = ValueError("no memory")
    failures: list[Exception] = []
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)

    with pytest.raises(ValueError, match="no memory") as caught:
        await block()
    assert log == ["a ready", "b ready", "c ended", "b ended", "a ended"]
    assert failures == [caught.value]


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


async def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    """No group round what the block raised."""
    log, children = three()
    error = LookupError("mine")
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            raise error

    with pytest.raises(LookupError) as caught:
        await block()
    assert caught.value is error
    assert supervisor.failure is None
    assert log == STOPPED


async def test_an_interrupt_comes_out_as_it_is() -> None:
    """Ctrl-C inside the block is Ctrl-C outside of it."""
    log, children = three()
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await block()
    assert log == STOPPED


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


async def test_an_actor_gone_outside_is_no_matter_of_the_supervisor() -> None:
    """A block may handle what it asked for."""
    counter = Counter()
    supervisor = Supervisor()
    async with supervisor:
        await supervisor.start("counter", counter.run)
        await supervisor.stop()
        with pytest.raises(ActorGone):
            await counter.address.ask(Count())
