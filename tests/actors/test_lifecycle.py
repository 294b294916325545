"""The lifecycle actor: what it makes the others do, in which order, and when it answers."""

import anyio
import pytest
from anyio.abc import TaskStatus

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import Ask, Pause, Resume, Suspend, Unpause
from megallm.core_async.plan.phases import Phase
from tests.actors.stage import KV_MODES, Stage, staged
from tests.checkpoints import AtAwait

pytestmark = pytest.mark.anyio

RELEASE: dict[KvMode, list[str]] = {
    "persist": [],
    "offload": ["ListContents", "release, contents kept"],
    "recompute": ["PreemptAll", "release, contents lost"],
}
RESTORE: dict[KvMode, list[str]] = {"persist": [], "offload": ["restore"], "recompute": ["restore"]}


# ---- pause ---------------------------------------------------------------------------------------


async def test_the_pump_may_plan_once_all_have_started_and_not_before() -> None:
    """A submission that comes early waits for the start."""
    assert not Stage().gate.is_allowed
    async with staged() as stage:
        assert stage.lifecycle.phase is Phase.RUNNING
        assert stage.gate.is_allowed
        assert stage.gate.is_open


async def test_a_pause_forbids_at_once_and_is_answered_when_the_pump_rests() -> None:
    """Whoever changes weights after it needs that no step is in flight."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        await stage.begin_ask(tasks, Pause())
        assert not stage.gate.is_allowed
        assert stage.lifecycle.phase is Phase.PAUSING
        assert stage.take_log() == []
        stage.rest()
        await anyio.wait_all_tasks_blocked()
        assert stage.lifecycle.phase is Phase.PAUSED
        assert stage.take_log() == ["pause: done"]


async def test_a_rest_by_an_earlier_order_does_not_end_a_pause() -> None:
    """The pump rested before the pause, and its report was on the way: a step may be in flight by now."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        before = stage.gate.order
        await stage.begin_ask(tasks, Pause())
        stage.rest(before)
        await anyio.wait_all_tasks_blocked()
        assert stage.lifecycle.phase is Phase.PAUSING
        stage.rest()


async def test_a_rest_means_nothing_where_none_is_awaited() -> None:
    """The pump reports each of them, and does not know the phase."""
    async with staged() as stage:
        for message in (Pause(), Suspend(), Resume()):
            stage.rest()
            await stage.finish(message)
        stage.rest()
        await anyio.wait_all_tasks_blocked()
        assert stage.lifecycle.phase is Phase.PAUSED
        await stage.finish(Unpause())
        stage.rest()
        await anyio.wait_all_tasks_blocked()
        assert stage.lifecycle.phase is Phase.RUNNING
        assert stage.gate.is_allowed


async def test_a_waiting_pause_holds_new_requests_and_lets_the_others_run() -> None:
    """They are admitted before the pump may plan again."""
    async with staged() as stage:
        async with anyio.create_task_group() as tasks:
            await stage.begin_ask(tasks, Pause("wait"))
            assert stage.take_log() == ["HoldNew"]
            assert stage.gate.is_allowed
            stage.rest()
        assert not stage.gate.is_allowed
        await stage.ask(Unpause())
        assert stage.take_log() == ["pause: done", "AdmitHeld", "unpause: done"]
        assert stage.gate.is_allowed


async def test_an_aborting_pause_ends_all_requests_before_it_is_answered() -> None:
    """Their readers hear of it from the detokeniser, who is told first."""
    async with staged() as stage:
        await stage.finish(Pause("abort"))
        await stage.ask(Pause("abort"))
        await anyio.wait_all_tasks_blocked()
        log = stage.take_log()
        assert log.count("TokenBatch") == 2
        assert [entry for entry in log if entry != "TokenBatch"] == ["FinishAll", "pause: done"] * 2


async def test_an_abort_overtakes_a_waiting_pause_and_needs_a_rest_of_its_own() -> None:
    """A pump that rests because it had nothing to do may be about to launch what came since."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        await stage.begin_ask(tasks, Pause("wait"), "wait")
        before = stage.gate.order
        await stage.begin_ask(tasks, Pause("abort"), "abort")
        assert not stage.gate.is_allowed
        stage.rest(before)
        await anyio.wait_all_tasks_blocked()
        assert stage.take_log() == ["HoldNew"]
        stage.rest()
        await anyio.wait_all_tasks_blocked()
        assert sorted(stage.take_log()) == ["FinishAll", "TokenBatch", "abort: done", "wait: done"]


# ---- suspend -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_mode", KV_MODES)
async def test_suspend_and_resume_treat_the_cache_as_the_mode_says(kv_mode: KvMode) -> None:
    """Requests lose their blocks before the contents go, and never where the contents stay."""
    async with staged(kv_mode) as stage:
        await stage.finish(Suspend())
        assert stage.lifecycle.phase is Phase.SUSPENDED
        assert stage.take_log() == [*RELEASE[kv_mode], "suspend: done"]
        await stage.ask(Suspend())
        await stage.ask(Pause())
        await stage.ask(Resume())
        await stage.ask(Resume())
        assert stage.take_log() == [
            "suspend: done",
            "pause: done",
            *RESTORE[kv_mode],
            "resume: done",
            "resume: done",
        ]
        assert stage.lifecycle.phase is Phase.PAUSED
        assert not stage.gate.is_allowed


async def test_unpausing_a_suspended_engine_is_refused_and_harms_nothing() -> None:
    """The buffers are gone: a step would compute with nothing."""
    async with staged("offload") as stage:
        await stage.finish(Suspend())
        with pytest.raises(
            LifecycleError, match=r"engine is suspended; call resume\(\) first \(legal: pause"
        ):
            await stage.lifecycle.address.ask(Unpause())
        assert not stage.gate.is_allowed
        await stage.ask(Resume())
        await stage.ask(Unpause())
        assert stage.lifecycle.phase is Phase.RUNNING


async def test_calls_that_come_during_a_transition_are_answered_in_their_order() -> None:
    """Each as if it had been made after the one before it: none is refused for coming early."""
    async with staged("offload") as stage, anyio.create_task_group() as tasks:
        stage.held_at = "release, contents kept"
        await stage.begin_ask(tasks, Suspend())
        stage.rest()
        await stage.is_held.wait()
        for message in (Unpause(), Resume(), Suspend(), Resume(), Unpause(), Pause()):
            await stage.begin_ask(tasks, message)
        assert stage.take_log() == RELEASE["offload"]
        stage.held_at = None
        stage.goes_on.set()
        await anyio.wait_all_tasks_blocked()
        assert stage.lifecycle.phase is Phase.PAUSING
        stage.rest()
        await anyio.wait_all_tasks_blocked()
        log = stage.take_log()
        assert [entry for entry in log if ":" not in entry] == [
            "restore",
            *RELEASE["offload"],
            "restore",
            "AdmitHeld",
        ]
        assert sorted(entry for entry in log if ":" in entry) == [
            "pause: done",
            "resume: done",
            "resume: done",
            "suspend: done",
            "suspend: done",
            "unpause: LifecycleError",
            "unpause: done",
        ]


# ---- failures and cancels ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("PreemptAll", Suspend()),
        ("release, contents lost", Suspend()),
        ("FinishAll", Pause("abort")),
        ("HoldNew", Pause("wait")),
    ],
)
async def test_a_failure_on_the_way_fails_the_call_and_all_that_wait(what: str, message: Ask[None]) -> None:
    """No caller may wait for a transition that has no end; the failure itself goes up."""
    stage = Stage("recompute")
    stage.failure = (what, failure := ArithmeticError("boom"))
    stage.held_at = what

    async def run() -> None:
        async with anyio.create_task_group() as callers, Supervisor() as supervisor:
            await supervisor.start("detokenizer", stage.detokenizer.run)
            await supervisor.start("scheduler", stage.scheduler.run)
            await supervisor.start("lifecycle", stage.lifecycle.run)
            await stage.lifecycle.begin()
            await stage.begin_ask(callers, message, "first")
            stage.rest()
            await stage.is_held.wait()
            for index, queued in enumerate((Pause(), Unpause(), Resume())):
                await stage.begin_ask(callers, queued, f"queued {index}")
            stage.goes_on.set()
            await anyio.sleep_forever()

    with pytest.RaisesGroup(
        pytest.RaisesExc(
            (ArithmeticError, ActorGone), check=lambda error: failure in (error, error.__cause__)
        )
    ):
        await run()
    answers = [entry for entry in stage.log if ":" in entry]
    assert sorted(answers) == ["first: ActorGone", *(f"queued {index}: ActorGone" for index in range(3))]
    with pytest.raises(ActorGone):
        await stage.lifecycle.address.ask(Pause())


async def test_a_stop_on_the_way_fails_the_call_and_all_that_wait() -> None:
    """The same when it is the caller who ends the engine meanwhile."""
    stage = Stage("offload")
    stage.held_at = "release, contents kept"
    async with anyio.create_task_group() as callers, Supervisor() as supervisor:
        await supervisor.start("scheduler", stage.scheduler.run)
        await supervisor.start("lifecycle", stage.lifecycle.run)
        await stage.lifecycle.begin()
        await stage.begin_ask(callers, Suspend())
        stage.rest()
        await stage.is_held.wait()
        await stage.begin_ask(callers, Resume())
        await supervisor.stop()
    assert stage.log[:2] == RELEASE["offload"]
    assert sorted(stage.log[2:]) == ["resume: ActorGone", "suspend: ActorGone"]


@pytest.mark.parametrize("num_awaits", range(1, 3))
@pytest.mark.parametrize("message", [Pause("wait"), Pause("abort"), Suspend()])
async def test_a_caller_that_is_cancelled_leaves_a_transition_that_ends(
    message: Ask[None], num_awaits: int
) -> None:
    """Others have joined it; and half a transition is no phase."""
    async with staged("recompute") as stage:
        async with anyio.create_task_group() as tasks:

            async def be_cancelled(*, task_status: TaskStatus[None]) -> None:
                with anyio.CancelScope() as scope:
                    ask = AtAwait(num_awaits, stage.lifecycle.address.ask(message), scope.cancel)
                    task_status.started()
                    await ask

            await tasks.start(be_cancelled)
            await anyio.wait_all_tasks_blocked()
            stage.rest()
        await stage.ask(Resume())
        await stage.ask(Unpause())
        assert stage.lifecycle.phase is Phase.RUNNING
        assert stage.take_log()[-1] == "unpause: done"
