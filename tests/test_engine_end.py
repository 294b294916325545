"""How the engine ends: shut down, cancelled, or failed. Nobody is left waiting, and everybody is told why."""

import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest

from megallm.core_async.actors.worker import Worker
from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.messages import Delta, StepPlan
from megallm.core_async.protocols import PendingStep
from tests.engines import Rig, engine_config, fake_runner, is_alive, running
from tests.fakes import FakeRunner, FakeTokenizer, continuation

pytestmark = pytest.mark.anyio

WITHIN_A_SECOND = 1.0


class BrokenError(Exception):
    """What the device raises."""


class BreaksLate:
    """A step whose failure shows only when its result is waited for, as a GPU's does."""

    def result(self) -> None:
        raise BrokenError("late")


class LateRunner(FakeRunner):
    """A runner whose fifth step fails late."""

    def launch(self, plan: StepPlan) -> PendingStep:
        pending = super().launch(plan)
        return BreaksLate() if plan.step == 5 else pending  # pyright: ignore[reportReturnType] - it never returns


def break_at(runner: FakeRunner, step: int, failure: BaseException) -> None:
    """Makes the forward pass of a step raise."""

    def before_launch(plan: StepPlan) -> None:
        if plan.step == step:
            raise failure

    runner.before_launch = before_launch


async def error_of(function: Callable[[], Awaitable[object]]) -> BaseException:
    """Makes a call that has to fail as the engine's end makes it, and gives the error."""
    try:
        await function()
    except (EngineDeadError, EngineStoppedError) as error:
        return error
    pytest.fail("the call did not fail")


async def until_running(rig: Rig) -> None:
    """Waits until a step was launched."""
    while not rig.runner.plans:
        await anyio.lowlevel.checkpoint()


async def nothing() -> None:
    """Does nothing: the engine ends by itself."""


async def errors_of_pending(rig: Rig, end: Callable[[], Awaitable[object]] = nothing) -> list[BaseException]:
    """Makes five calls that would take long, ends the engine, and gives what each raised in a second."""
    errors: list[BaseException] = []

    async def call(index: int) -> None:
        errors.append(await error_of(lambda: rig.tokens_of([index], 100)))

    with anyio.fail_after(WITHIN_A_SECOND):
        async with anyio.create_task_group() as tasks:
            for index in range(5):
                tasks.start_soon(call, index)
            await end()
    return errors


# ---- failure -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_threaded", [False, True], ids=["task", "thread"])
@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as a CPU", "as a GPU"])
@pytest.mark.parametrize("step", [1, 2, 7])
async def test_a_failing_forward_pass_fails_every_call_with_the_cause(
    is_threaded: bool,  # noqa: FBT001 - pytest passes it by name
    runs_at_launch: bool,  # noqa: FBT001 - pytest passes it by name
    step: int,
) -> None:
    """Whoever waits has to learn that it is over and what broke: no hang, no error of the engine's own."""
    failure = BrokenError("boom")
    async with running(is_threaded=is_threaded, runs_at_launch=runs_at_launch) as rig:
        break_at(rig.runner, step, failure)
        errors = await errors_of_pending(rig)
        assert [type(error) for error in errors] == [EngineDeadError] * 5
        assert {error.__cause__ for error in errors} == {failure}
        assert len({id(error) for error in errors}) == 5, "a traceback grows in each of them"
        assert "the engine failed: BrokenError: boom" in str(errors[0])
        with pytest.raises(EngineDeadError) as later:
            await rig.tokens_of([1])
        assert later.value.__cause__ is failure
        with pytest.raises(EngineDeadError) as waited:
            await rig.engine.wait_for_shutdown()
        assert waited.value.__cause__ is failure
        with anyio.fail_after(WITHIN_A_SECOND):
            await rig.engine.shutdown()
            await rig.engine.shutdown()


async def test_a_call_that_comes_at_any_moment_of_the_failure_has_the_cause() -> None:
    """While the actors stop one after the other, whoever is asked last has only heard of another's end."""
    for step in range(1, 12):
        failure = BrokenError("boom")
        errors: list[BaseException] = []
        async with running() as rig:
            break_at(rig.runner, step, failure)

            async def call(rig: Rig = rig, errors: list[BaseException] = errors) -> None:
                errors.append(await error_of(lambda: rig.tokens_of([1], 100)))

            async with anyio.create_task_group() as tasks:
                for _ in range(40):
                    tasks.start_soon(call)
                    await anyio.lowlevel.checkpoint()
        assert [(type(error), error.__cause__) for error in errors] == [(EngineDeadError, failure)] * 40


async def test_a_failure_that_shows_late_is_the_same() -> None:
    """A GPU reports what went wrong when the result is fetched, a step or two on."""
    config = engine_config()
    runner = LateRunner(num_blocks=config.num_blocks, block_size=4, max_requests=config.max_requests)
    runner.runs_at_launch = False
    rig = Rig(Engine(config, runner, FakeTokenizer()), runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(rig.engine.run)
        errors = await errors_of_pending(rig)
        assert [str(error.__cause__) for error in errors] == ["late"] * 5
        await rig.engine.shutdown()


async def test_what_came_before_the_failure_is_still_read() -> None:
    """A stream shows all that was generated, and then the error."""
    async with running() as rig:
        outbox = await rig.engine.submit([rig.request([5], 100, is_streamed=True)])
        break_at(rig.runner, 9, BrokenError("boom"))
        await anyio.wait_all_tasks_blocked()
        deltas = [parcel for parcel in await outbox.take() if isinstance(parcel, Delta)]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == continuation([5], len(tokens))
        assert 0 < len(tokens) < 9
        with pytest.raises(EngineDeadError):
            await outbox.take()


async def test_a_failed_engine_gives_the_runner_back() -> None:
    """The model is the user's: it comes back unbound, whatever happened."""
    async with running(is_threaded=True) as rig:
        break_at(rig.runner, 3, BrokenError("boom"))
        await errors_of_pending(rig)
        await rig.engine.shutdown()
        assert rig.runner.is_closed


async def test_a_start_that_fails_raises_what_failed_and_leaves_nothing() -> None:
    """Too little memory is the most common of all failures, and shows here."""

    class NoRoom(FakeRunner):
        def start(self) -> None:
            raise MemoryError("no room")

    engine = Engine(engine_config(), NoRoom(), FakeTokenizer(), make_worker=Worker)
    with pytest.raises(MemoryError, match="no room"):
        await engine.run()
    assert not is_alive(engine)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("megallm")] == []


# ---- shutdown ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_threaded", [False, True], ids=["task", "thread"])
async def test_shutdown_ends_pending_and_later_calls(is_threaded: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Upstream cancels them; an error says whose choice it was."""
    async with running(is_threaded=is_threaded) as rig:

        async def end() -> None:
            await until_running(rig)
            await rig.engine.shutdown()

        errors = await errors_of_pending(rig, end)
        assert [type(error) for error in errors] == [EngineStoppedError] * 5
        assert str(errors[0]) == "the engine was shut down"
        with pytest.raises(EngineStoppedError):
            await rig.tokens_of([1])
        await rig.engine.wait_for_shutdown()
        assert rig.runner.is_closed is is_threaded, "the worker without a thread never closes its runner"


async def test_shutdown_ends_pending_calls_while_the_step_in_flight_still_runs() -> None:
    """A long step is waited for, but not by the callers: what it gives is no longer theirs."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold(_plan: StepPlan) -> None:
        is_held.set()
        may_go.wait()

    async def end() -> None:
        await anyio.to_thread.run_sync(is_held.wait)
        stopping.start_soon(rig.engine.shutdown)

    async with running(is_threaded=True) as rig, anyio.create_task_group() as stopping:
        rig.runner.before_launch = hold
        errors = await errors_of_pending(rig, end)
        assert [type(error) for error in errors] == [EngineStoppedError] * 5
        assert not rig.runner.is_closed
        may_go.set()
    assert rig.runner.is_closed


async def test_shutdown_may_be_called_by_many_and_again() -> None:
    """Signal handlers, `finally` blocks and context managers all call it."""
    async with running() as rig, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(rig.engine.shutdown)
            tasks.start_soon(rig.engine.wait_for_shutdown)
    with anyio.fail_after(WITHIN_A_SECOND):
        await rig.engine.shutdown()


async def test_shutdown_finds_an_idle_engine_and_a_busy_one() -> None:
    """Cancelled at any await, no actor may keep another from stopping."""
    for num_checkpoints in range(25):
        async with running() as rig, anyio.create_task_group() as tasks:
            tasks.start_soon(error_of, lambda rig=rig: rig.tokens_of([5] * 9, 100))
            for _ in range(num_checkpoints):
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(WITHIN_A_SECOND):
                await rig.engine.shutdown()


async def test_cancelling_the_task_it_runs_in_stops_it() -> None:
    """A caller's scope round the engine is as good as `shutdown`."""
    config = engine_config()
    runner = fake_runner(config)
    rig = Rig(Engine(config, runner, FakeTokenizer()), runner)
    errors: list[BaseException] = []
    async with anyio.create_task_group() as tasks:
        await tasks.start(rig.engine.run)

        async def end() -> None:
            await until_running(rig)
            tasks.cancel_scope.cancel()

        with anyio.CancelScope(shield=True):
            errors += await errors_of_pending(rig, end)
    assert [type(error) for error in errors] == [EngineStoppedError] * 5
    assert runner.is_closed


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_callbacks_posted_after_the_end_are_dropped(backend: str) -> None:
    """A stream that is collected when its loop is gone still tries to close its outbox."""
    called: list[bool] = []

    async def run_and_stop() -> Engine:
        async with running() as rig:
            rig.engine.post(lambda: called.append(True))
            await anyio.wait_all_tasks_blocked()
        return rig.engine

    engine = anyio.run(run_and_stop, backend=backend)
    engine.post(lambda: called.append(False))
    assert called == [True]
