"""The link to one worker of this process: plans in, results out, in order, and none forgotten."""

import anyio
import pytest

from megallm.core_async.errors import ActorGone
from megallm.core_async.messages import Row, RowSetup, Sampling, StepPlan, pack_ints, unpack_ints
from megallm.core_async.transport.link import LocalLink
from tests.checkpoints import AtAwait
from tests.fakes import FakeRunner, InlineWorker, continuation

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("collects_at_once", [False, True])]


def step(number: int) -> StepPlan:
    """Gives the plan that computes the prompt [number] at row `number` and samples one token."""
    one = pack_ints([number])
    return StepPlan(
        step=number,
        num_decode=0,
        rows=one,
        starts=pack_ints([0]),
        lengths=pack_ints([1]),
        samples=b"\1",
        tokens=one,
        new_rows=[RowSetup(Row(number), Sampling(temperature=0.0))],
        changed_rows=one,
        changed_starts=pack_ints([0]),
        changed_counts=pack_ints([1]),
        blocks=one,
    )


async def test_results_come_in_the_order_of_the_plans(collects_at_once: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """The scheduler takes the next result for that of its oldest plan."""
    worker = InlineWorker(FakeRunner())
    link = LocalLink(worker.address, collects_at_once=collects_at_once)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        for number in (1, 2):
            await link.launch(step(number))
            assert link.in_flight == number
        for number in (1, 2):
            result = await link.collect()
            assert result.step == number
            assert list(unpack_ints(result.tokens)) == continuation([number], 1)
            assert link.in_flight == 2 - number
        tasks.cancel_scope.cancel()


async def test_a_collect_that_is_cancelled_leaves_the_plan_in_flight(collects_at_once: bool) -> None:  # noqa: FBT001 - as above
    """It was not collected, so it must be counted still."""
    worker = InlineWorker(FakeRunner())
    link = LocalLink(worker.address, collects_at_once=collects_at_once)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        await link.launch(step(1))
        with anyio.CancelScope() as scope:
            await AtAwait(1, link.collect(), scope.cancel)
        if scope.cancelled_caught:
            assert link.in_flight == 1
        tasks.cancel_scope.cancel()


async def test_the_cache_is_released_and_restored_behind_the_steps(collects_at_once: bool) -> None:  # noqa: FBT001 - as above
    """Commands take the way of the plans, so they can't overtake one."""
    runner = FakeRunner()
    worker = InlineWorker(runner)
    link = LocalLink(worker.address, collects_at_once=collects_at_once)
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        await link.launch(step(1))
        await link.release_cache(pack_ints([1]))
        assert runner.is_released
        assert runner.kept == [1]
        assert [plan.step for plan in runner.plans] == [1]
        await link.restore_cache()
        assert not runner.is_released
        assert (await link.collect()).step == 1
        tasks.cancel_scope.cancel()


async def test_a_worker_that_fails_fails_the_collect(collects_at_once: bool) -> None:  # noqa: FBT001 - as above
    """The pump hears of a dead device where it waits for it, and at every call after that."""
    runner = FakeRunner()

    def fail(plan: StepPlan) -> None:
        raise ValueError(f"broken at step {plan.step}")

    runner.before_launch = fail
    worker = InlineWorker(runner)
    link = LocalLink(worker.address, collects_at_once=collects_at_once)

    async def collect() -> None:
        with pytest.raises(ActorGone, match="worker failed: ValueError"):
            await link.collect()

    async with anyio.create_task_group() as outside:
        await link.launch(step(1))
        outside.start_soon(collect)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="broken at step 1"):
            await worker.run()
    assert link.in_flight == 1
    with pytest.raises(ActorGone):
        await link.launch(step(2))
    with pytest.raises(ActorGone):
        await link.release_cache(pack_ints([1]))
