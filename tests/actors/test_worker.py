"""The worker: every call of the runner on one thread, in order, and the model given back at the end."""

import threading
from collections.abc import Callable

import anyio
import pytest

from megallm.core_async.actors.worker import Worker
from megallm.core_async.errors import ActorGone
from megallm.core_async.messages import (
    CollectStep,
    Ints,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    Row,
    RowSetup,
    Sampling,
    StepPlan,
    StepResult,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.protocols import PendingStep
from tests.askers import Outcomes
from tests.fakes import FakeRunner, continuation
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


class WatchedRunner(FakeRunner):
    """A runner that writes down its calls, and on which threads they came."""

    def __init__(self, on_call: Callable[[str], object] = lambda call: None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.on_call = on_call

    def note(self, call: str) -> None:
        """Writes a call down; may break of it."""
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        self.on_call(call)

    def start(self) -> None:
        """See Runner."""
        self.note("start")
        super().start()

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Runner."""
        self.note(f"launch {plan.step}")
        return WatchedPending(self, super().launch(plan))

    def release_cache(self, kept: Ints) -> None:
        """See Runner."""
        self.note(f"release all but {list(unpack_ints(kept))}")
        super().release_cache(kept)

    def restore_cache(self) -> None:
        """See Runner."""
        self.note("restore")
        super().restore_cache()

    def close(self) -> None:
        """See Runner."""
        self.note("close")
        super().close()


class WatchedPending:
    """A step whose collection is written down."""

    def __init__(self, runner: WatchedRunner, pending: PendingStep) -> None:
        self.runner = runner
        self.pending = pending

    def result(self) -> StepResult:
        """See PendingStep."""
        result = self.pending.result()
        self.runner.note(f"result {result.step}")
        return result


def step(number: int, tokens: list[int]) -> StepPlan:
    """Gives the plan that computes a prompt at row `number` and samples one token."""
    return StepPlan(
        step=number,
        num_decode=0,
        rows=pack_ints([number]),
        starts=pack_ints([0]),
        lengths=pack_ints([len(tokens)]),
        samples=b"\1",
        tokens=pack_ints(tokens),
        new_rows=[RowSetup(Row(number), Sampling(temperature=0.0))],
        changed_rows=pack_ints([number]),
        changed_starts=pack_ints([0]),
        changed_counts=pack_ints([1]),
        blocks=pack_ints([number]),
    )


def failing_at(call: str) -> Callable[[str], object]:
    """Gives what breaks at one call."""

    def fail(seen: str) -> None:
        if seen == call:
            raise ValueError(f"broken at {call}")

    return fail


async def test_steps_run_in_order_on_one_thread_and_not_on_the_loops() -> None:
    """CUDA's current device is the thread's, and the loop must go on while the device works."""
    runner = WatchedRunner()
    worker = Worker(runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        assert runner.calls == ["start"]
        for number in (1, 2):
            worker.address.tell(LaunchStep(step(number, [number, 5])))
        for number in (1, 2):
            result = await worker.address.ask(CollectStep())
            assert result.step == number
            assert list(unpack_ints(result.tokens)) == continuation([number, 5], 1)
        tasks.cancel_scope.cancel()
    assert runner.calls == ["start", "launch 1", "launch 2", "result 1", "result 2", "close"]
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


async def test_the_cache_is_released_and_restored_on_the_same_thread() -> None:
    """Device memory belongs to the thread's device too."""
    runner = WatchedRunner()
    worker = Worker(runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        await worker.address.ask(ReleaseCache(pack_ints([2, 7])))
        assert runner.is_released
        await worker.address.ask(RestoreCache())
        assert not runner.is_released
        tasks.cancel_scope.cancel()
    assert runner.calls == ["start", "release all but [2, 7]", "restore", "close"]
    assert len(runner.threads) == 1


async def test_a_start_that_fails_closes_the_runner_and_raises_what_failed() -> None:
    """Half of a model's hooks must not stay in it."""
    runner = WatchedRunner(failing_at("start"))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ValueError, match="broken at start"):
            await tasks.start(Worker(runner).run)
    assert runner.calls == ["start", "close"]


@pytest.mark.parametrize("call", ["launch 1", "result 1", "launch 2"])
async def test_a_failing_step_fails_who_waits_for_it_and_closes_the_runner(call: str) -> None:
    """A launch has no asker of its own: whoever wants a result hears of it, now or later."""
    runner = WatchedRunner(failing_at(call))
    worker = Worker(runner)
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        for number in (1, 2):
            worker.address.tell(LaunchStep(step(number, [number])))
        for _ in range(2):
            await outcomes.ask(outside, worker.address, CollectStep())
        with pytest.raises(ValueError, match=f"broken at {call}"):
            await worker.run()
    assert [str(error)[:13] for error in outcomes.errors] == ["worker failed"] * 2
    assert runner.calls[-1] == "close"
    assert runner.is_closed
    with pytest.raises(ActorGone):
        worker.address.tell(LaunchStep(step(3, [3])))


async def test_a_stop_with_steps_in_flight_closes_the_runner() -> None:
    """Results that nobody will collect are dropped; the model is given back all the same."""
    runner = WatchedRunner()
    worker = Worker(runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        worker.address.tell(LaunchStep(step(1, [1])))
        while "launch 1" not in runner.calls:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert runner.calls == ["start", "launch 1", "close"]


async def test_a_result_that_was_never_launched_fails_loudly() -> None:
    """The pump has lost count."""
    worker = Worker(WatchedRunner())
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside:
        await outcomes.ask(outside, worker.address, CollectStep())
        with pytest.raises(IndexError):
            await worker.run()
    assert len(outcomes.errors) == 1
