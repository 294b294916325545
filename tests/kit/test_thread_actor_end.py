"""Actors with a thread that break or are stopped: no thread, descriptor or ask is left behind."""

import gc
import logging
import threading
from typing import ClassVar

import anyio
import pytest
from anyio.abc import TaskStatus

from megallm.core_async.kit.supervisor import Supervisor
from tests.askers import Outcomes
from tests.checkpoints import AtAwait
from tests.freed import open_descriptors
from tests.kit.callers import Call, Caller, Hold, boom, leave, nothing, threads_of
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


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


async def test_a_cleanup_that_hangs_after_a_failure_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """A device that has failed is the likeliest to hang; its askers must hear of the failure all the same."""
    hold = Hold()
    actor = Impatient(stop=hold)
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken")):
            async with anyio.create_task_group() as tasks:
                await tasks.start(actor.run)
                await anyio.wait_all_tasks_blocked()
                await outcomes.ask(outside, actor.address, Call(boom))
    assert [str(error) for error in outcomes.errors] == ["caller failed: ValueError('broken')"]
    assert "is left behind" in caplog.text
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "megallm-caller"]
    hold.release()
    thread.join()


async def test_its_own_failure_comes_before_those_that_follow_from_it() -> None:
    """Whoever finds it gone fails as well; the supervisor has to hear of the cause first."""
    actor = Caller(stop=(hold := Hold()))
    failures: list[Exception] = []

    async def ask_again(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await hold.begun()  # it has failed and cleans up
        hold.release()
        while True:
            await actor.address.ask(Call(nothing))

    async def supervise() -> None:
        async with Supervisor(failures.append) as supervisor:
            await supervisor.start("caller", actor.run)
            await supervisor.start("asker", ask_again)
            actor.address.tell(Call(boom))
            await anyio.sleep_forever()

    with pytest.raises(ValueError, match="broken"):
        await supervise()
    assert [type(failure) for failure in failures] == [ValueError]


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
