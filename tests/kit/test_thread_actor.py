"""Actors with a thread: the contract of an actor, and no thread, descriptor or ask left behind."""

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import anyio
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.thread_actor import ThreadActor
from megallm.core_async.messages import Ask
from tests.askers import Outcomes
from tests.checkpoints import AtAwait
from tests.freed import open_descriptors
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


class Call(Ask[Any], frozen=True):  # Any: whatever the function gives
    """Call a function on the actor's thread and answer with what it gives."""

    function: Callable[[], object]


def boom() -> None:
    """Breaks."""
    raise ValueError("broken")


def leave() -> None:
    """Does what ends a whole program elsewhere."""
    raise SystemExit(3)


def nothing() -> None:
    """Does nothing."""


class Caller(ThreadActor[Call]):
    """Calls functions on its thread."""

    name: ClassVar[str] = "caller"
    capacity: ClassVar[int] = 4

    def __init__(self, start: Callable[[], object] = nothing, stop: Callable[[], object] = nothing) -> None:
        super().__init__()
        self.start = start
        self.stop = stop
        self.events: list[str] = []
        self.threads: set[str] = set()

    def note(self, event: str) -> None:
        """Writes down what happens, and on which thread."""
        self.events.append(event)
        self.threads.add(threading.current_thread().name)

    def on_start(self) -> None:
        """Calls `start`."""
        self.note("start")
        self.start()

    def handle(self, message: Call) -> object:
        """Makes the call."""
        self.note("handle")
        return message.function()

    def on_stop(self) -> None:
        """Calls `stop`."""
        self.note("stop")
        self.stop()


class Hold:
    """A call that takes until it is released; a test knows when it is under way."""

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._is_released = threading.Event()

    def __call__(self) -> str:
        self._has_begun.set()
        assert self._is_released.wait(10), "never released"
        return "held"

    async def begun(self) -> None:
        """Waits until the call is under way."""
        await anyio.to_thread.run_sync(self._has_begun.wait)

    def release(self) -> None:
        """Lets the call end."""
        self._is_released.set()


def threads_of(actor: Caller) -> list[str]:
    """Gives the actor's threads that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name == f"megallm-{actor.name}"]


async def test_everything_happens_on_one_thread_and_in_order() -> None:
    """A CUDA device is the thread's, and a model must not be called from two."""
    actor = Caller()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        assert actor.events == ["start"]
        actor.address.tell(Call(nothing))
        assert await actor.address.ask(Call(lambda: 5)) == 5
        tasks.cancel_scope.cancel()
    assert actor.events == ["start", "handle", "handle", "stop"]
    assert actor.threads == {"megallm-caller"}
    assert threads_of(actor) == []


async def test_many_asks_at_once_are_all_answered() -> None:
    """Answers that come faster than the loop looks share a wake-up: none may be left lying."""
    actor = Caller()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        async with anyio.create_task_group() as outside:
            for number in range(200):
                while len(outcomes.values) < number - 2:
                    await anyio.lowlevel.checkpoint()
                await outcomes.ask(outside, actor.address, Call(lambda number=number: number))
        tasks.cancel_scope.cancel()
    assert sorted(outcomes.values) == list(range(200))


async def test_an_ask_from_before_the_start_is_answered() -> None:
    """The thread may be ready and have answered before the loop looks for the first time."""
    actor = Caller()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as outside:
            for number in range(3):
                await outcomes.ask(outside, actor.address, Call(lambda number=number: number))
            await tasks.start(actor.run)
        tasks.cancel_scope.cancel()
    assert sorted(outcomes.values) == [0, 1, 2]


async def test_the_start_waits_for_on_start() -> None:
    """An engine that says it is ready has its model bound."""
    hold = Hold()
    actor = Caller(start=hold)
    has_started = anyio.Event()

    async def start(tasks: TaskGroup) -> None:
        await tasks.start(actor.run)
        has_started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start, tasks)
        await hold.begun()
        assert not has_started.is_set()
        hold.release()
        await has_started.wait()
        tasks.cancel_scope.cancel()


async def test_a_failing_start_raises_its_error_and_leaves_nothing() -> None:
    """A model that is refused must not keep a thread, and the user must see why, not a group."""
    before = open_descriptors()
    actor = Caller(start=boom)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ValueError, match="broken"):
            await tasks.start(actor.run)
    assert actor.events == ["start", "stop"]
    assert threads_of(actor) == []
    assert open_descriptors() == before
    with pytest.raises(ActorGone, match="caller failed: ValueError"):
        actor.address.tell(Call(nothing))


async def test_a_crash_fails_the_ask_in_hand_and_those_that_wait() -> None:
    """The pump that waits for a step must hear that the device is dead."""
    actor = Caller()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        for function in (lambda: 1, boom, lambda: 2):
            await outcomes.ask(outside, actor.address, Call(function))
        with pytest.raises(ValueError, match="broken") as crash:
            await actor.run()
        await anyio.wait_all_tasks_blocked()
        assert outcomes.errors[0].__cause__ is crash.value
    assert outcomes.values == [1]
    assert [str(error) for error in outcomes.errors] == ["caller failed: ValueError('broken')"] * 2
    assert outcomes.errors[0] is not outcomes.errors[1]
    assert actor.events == ["start", "handle", "handle", "stop"]
    assert threads_of(actor) == []


async def test_the_crash_of_a_tell_ends_the_actor() -> None:
    """Nobody waits for a launch, so only the supervisor can notice."""
    actor = Caller()
    actor.address.tell(Call(boom))
    with pytest.raises(ValueError, match="broken"):
        await actor.run()


async def test_the_first_failure_is_the_one_reported() -> None:
    """Cleaning up after a failure often fails too; the reader needs the cause."""

    def fail_again() -> None:
        raise KeyError("on stop")

    actor = Caller(stop=fail_again)
    actor.address.tell(Call(boom))
    with pytest.raises(ValueError, match="broken"):
        await actor.run()


async def test_a_failure_on_stop_is_raised_although_the_actor_was_cancelled() -> None:
    """A model that could not be given back is something the user has to know."""
    actor = Caller(stop=boom)
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken")):
        async with anyio.create_task_group() as tasks:
            await tasks.start(actor.run)
            tasks.cancel_scope.cancel()
    assert threads_of(actor) == []


async def test_what_ends_a_thread_silently_elsewhere_is_a_failure_here() -> None:
    """Threads swallow SystemExit, and everybody would wait for an answer for ever."""
    actor = Caller()
    actor.address.tell(Call(leave))
    with pytest.raises(RuntimeError, match=r"caller raised SystemExit\(3\) on its thread") as failure:
        await actor.run()
    assert isinstance(failure.value.__cause__, SystemExit)
    assert actor.events == ["start", "handle", "stop"]


async def test_a_full_mailbox_fails_loudly() -> None:
    """Two plans are in flight at most: more is a pump that lost count."""
    actor = Caller()
    for _ in range(4):
        actor.address.tell(Call(nothing))
    with pytest.raises(AssertionError, match="mailbox of caller is full: 4 wait, Call refused"):
        actor.address.tell(Call(nothing))
    with pytest.raises(AssertionError, match="mailbox of caller is full"):
        await actor.address.ask(Call(nothing))
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        while len(actor.events) < 5:
            await anyio.lowlevel.checkpoint()
        assert await actor.address.ask(Call(lambda: 5)) == 5
        tasks.cancel_scope.cancel()


async def test_an_asker_that_is_cancelled_disturbs_nobody() -> None:
    """Its answer comes all the same, and the next ask must not get it."""
    actor = Caller()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        for number in range(5):
            with anyio.CancelScope() as scope:
                await AtAwait(1, actor.address.ask(Call(lambda: "nobody's")), scope.cancel)
            assert await actor.address.ask(Call(lambda number=number: number)) == number
        tasks.cancel_scope.cancel()


async def test_a_stop_lets_the_message_in_hand_finish_and_drops_those_behind_it() -> None:
    """A forward pass can't be cut short, and the next one is not worth waiting for."""
    actor = Caller()
    hold = Hold()
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside, anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        for function in (hold, nothing, nothing):
            await outcomes.ask(outside, actor.address, Call(function))
        await hold.begun()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        assert threads_of(actor) == ["megallm-caller"]
        hold.release()
    assert outcomes.values == ["held"]
    assert [str(error) for error in outcomes.errors] == ["caller has stopped"] * 2
    assert actor.events == ["start", "handle", "stop"]
    assert threads_of(actor) == []


async def test_a_stop_during_the_start_waits_for_it_and_cleans_up() -> None:
    """A half-bound model must be unbound, on the thread that bound it."""
    actor = Caller(start=(hold := Hold()))
    actor.address.tell(Call(nothing))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await hold.begun()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        hold.release()
    assert actor.events == ["start", "stop"]
    assert actor.threads == {"megallm-caller"}
    assert threads_of(actor) == []


async def test_an_idle_actor_stops_at_once() -> None:
    """The deadline is for a device that hangs; nobody else waits for it."""
    actor = Caller()
    with anyio.fail_after(actor.stop_deadline_s / 2):
        async with anyio.create_task_group() as tasks:
            await tasks.start(actor.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert threads_of(actor) == []


class Impatient(Caller):
    """Waits for nobody."""

    stop_deadline_s: ClassVar[float] = 0.01


async def test_a_thread_that_hangs_is_left_behind_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A dead device must not keep the program; the thread closes its descriptor when it ends after all."""
    hold = Hold()
    outcomes = Outcomes()
    before = open_descriptors()
    actor = Impatient()
    async with anyio.create_task_group() as outside, anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        await outcomes.ask(outside, actor.address, Call(hold))
        while "handle" not in actor.events:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert [str(error) for error in outcomes.errors] == ["caller has stopped"]
    assert caplog.record_tuples == [
        (
            "megallm.core_async.kit.thread_actor",
            logging.WARNING,
            "caller: the thread is still busy after 0.01 s and is left behind",
        )
    ]
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "megallm-caller"]
    hold.release()
    thread.join()
    assert actor.events == ["start", "handle", "stop"]
    gc.collect()  # trio keeps the cancelled wait in a cycle
    assert open_descriptors() == before


@pytest.mark.parametrize("nth", range(1, 8))
async def test_nothing_hangs_or_stays_wherever_the_actor_is_cancelled(nth: int) -> None:
    """At every await: each ask has an outcome, and thread and descriptor are gone."""
    before = open_descriptors()
    actor = Caller()
    outcomes = Outcomes()

    async def ask_in_turn(scope: anyio.CancelScope) -> None:
        async with anyio.create_task_group() as askers:
            for number in range(4):
                await outcomes.ask(askers, actor.address, Call(lambda number=number: number))
                await anyio.lowlevel.checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as outside:
        with anyio.CancelScope() as scope:
            outside.start_soon(ask_in_turn, scope)
            await AtAwait(nth, actor.run(), scope.cancel)
    assert len(outcomes.values) + len(outcomes.errors) == 4
    assert set(outcomes.values) <= {0, 1, 2, 3}
    assert actor.events[-1] == "stop"
    assert threads_of(actor) == []
    assert open_descriptors() == before
