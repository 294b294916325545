"""Requests of one program run on several replicas, and nobody can tell; a lost one takes its own along."""

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest
from msgspec.structs import replace

from megallm.core_async.actors.scheduler import Scheduler
from megallm.core_async.errors import EngineBusy, EngineDeadError, EngineStoppedError, LifecycleError
from megallm.core_async.messages import Completion, StepPlan
from megallm.core_async.plan.phases import Phase
from megallm.core_async.plan.roster import Roster
from tests.engines import engine_config
from tests.fakes import continuation
from tests.loops import EVERY_LOOP
from tests.ranks.in_process_replicas import Fleet, running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


def prompts_of(count: int) -> list[list[int]]:
    """Gives prompts, no two alike."""
    return [[number, number + 1] for number in range(count)]


async def complete(fleet: Fleet, prompts: list[list[int]], num_tokens: int = 8) -> list[Completion]:
    """Gives what prompts are continued by."""
    return await fleet.rig.complete(*(fleet.rig.request(prompt, num_tokens) for prompt in prompts))


async def expect_right(fleet: Fleet, prompts: list[list[int]], num_tokens: int = 8) -> None:
    """Fails unless prompts are continued as one engine does."""
    completions = await complete(fleet, prompts, num_tokens)
    expected = [continuation(prompt, num_tokens) for prompt in prompts]
    assert [each.token_ids for each in completions] == expected


async def everywhere(fleet: Fleet, call: str) -> list[str]:
    """Makes a call of the lifecycle in every replica's program; gives the errors it raised."""
    errors: list[str] = []

    async def make(method: Callable[[], Awaitable[None]]) -> None:
        try:
            await method()
        except LifecycleError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        for calls in fleet.calls:
            tasks.start_soon(make, getattr(calls, call))
    return errors


def phases(fleet: Fleet) -> set[Phase]:
    """Gives where the replicas are."""
    return {engine.phase for engine in (fleet.coordinator, *fleet.others)}


def failing_at(step: int) -> Callable[[StepPlan], None]:
    """Gives what breaks a fake model at a step."""

    def check(plan: StepPlan) -> None:
        if plan.step >= step:
            raise ArithmeticError("the weights are broken")

    return check


@pytest.mark.parametrize("steps_together", [False, True])
async def test_requests_run_on_every_replica_and_give_what_one_gives(
    steps_together: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The load is shared; the tokens are those of a single engine."""
    async with running_fleet(3, steps_together=steps_together) as fleet:
        await expect_right(fleet, prompts_of(12))
        assert min(fleet.num_steps()) > 0
        stats = fleet.coordinator.stats()
        assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 12 * 8)
        assert stats.free_blocks == 3 * fleet.coordinator.config.num_blocks


async def test_forks_of_a_prompt_run_where_its_blocks_are() -> None:
    """Several continuations of one prompt cost one prefill, not one on each replica."""
    async with running_fleet() as fleet:
        requests = [replace(fleet.rig.request(range(40), 4), shares_prefix=True) for _ in range(6)]
        completions = await fleet.rig.complete(*requests)
        assert [each.token_ids for each in completions] == [continuation(range(40), 4)] * 6
        assert sorted(steps > 0 for steps in fleet.num_steps()) == [False, True]
        assert fleet.coordinator.stats().prefill_tokens < 2 * 40


async def test_a_request_that_nobody_reads_any_more_frees_its_blocks_wherever_it_runs() -> None:
    """A client that leaves is not told where its request was."""
    async with running_fleet() as fleet:
        outboxes = [await fleet.coordinator.submit([fleet.rig.request(each, 100)]) for each in prompts_of(4)]
        for outbox in outboxes:
            outbox.close()
        await expect_right(fleet, prompts_of(4), 2)
        assert fleet.coordinator.stats().used_blocks == 0


async def test_a_stop_word_ends_a_request_that_runs_elsewhere() -> None:
    """Text is made by the coordinator alone; the replica hears of it as of a reader who left."""
    async with running_fleet() as fleet:
        requests = [fleet.rig.request(each, 100, stop_words=("7",)) for each in prompts_of(2)]
        completions = await fleet.rig.complete(*requests)
        assert {each.finish_reason for each in completions} == {"stop"}
        await expect_right(fleet, prompts_of(2), 2)
        assert fleet.coordinator.stats().used_blocks == 0


@pytest.mark.parametrize("steps_together", [False, True])
async def test_every_replica_takes_part_in_the_lifecycle(
    steps_together: bool,  # noqa: FBT001 - the same
) -> None:
    """A trainer on any rank may rely on it; requests that wait meanwhile lose nothing."""
    async with running_fleet(steps_together=steps_together) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(expect_right, fleet, prompts_of(6), 60)
        assert await everywhere(fleet, "pause") == []
        assert phases(fleet) == {Phase.PAUSED}
        assert await everywhere(fleet, "suspend") == []
        assert phases(fleet) == {Phase.SUSPENDED}
        refusals = await everywhere(fleet, "unpause")
        assert len(refusals) == 2
        assert all("resume" in refusal for refusal in refusals)
        assert await everywhere(fleet, "resume") == []
        assert await everywhere(fleet, "unpause") == []
        assert phases(fleet) == {Phase.RUNNING}


async def test_a_call_waits_for_every_program() -> None:
    """Else a trainer would change weights that a step still reads."""
    async with running_fleet() as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.calls[1].pause)
        await anyio.wait_all_tasks_blocked()
        assert phases(fleet) == {Phase.RUNNING}
        await fleet.calls[0].pause()
        assert phases(fleet) == {Phase.PAUSED}


async def test_what_had_produced_nothing_runs_elsewhere_when_a_replica_is_lost() -> None:
    """It cost nobody anything yet, so nobody need know."""
    async with running_fleet(3) as fleet:
        fleet.runners[1].before_launch = failing_at(1)
        await expect_right(fleet, prompts_of(9))
        with pytest.raises(EngineDeadError, match="ArithmeticError"):
            await fleet.others[0].wait_for_shutdown()
        assert fleet.others[1].phase is Phase.RUNNING
        await expect_right(fleet, prompts_of(9))


async def test_a_lost_replica_fails_the_requests_it_had_begun_and_no_others() -> None:
    """Each says which rank it was; the engine goes on, and so do its calls."""
    async with running_fleet() as fleet:
        fleet.runners[1].before_launch = failing_at(6)
        completions = await complete(fleet, prompts_of(6), 12)
        failed = [each for each in completions if each.finish_reason == "error"]
        assert len(failed) == 3
        assert {each.stop_reason for each in failed} == {
            "rank 4 failed: ArithmeticError: the weights are broken"
        }
        await expect_right(fleet, prompts_of(6))
        await fleet.calls[0].pause()
        assert fleet.coordinator.phase is Phase.PAUSED


async def test_what_finds_no_room_elsewhere_fails_with_the_lost_replicas_name() -> None:
    """It must not wait for ever for a place that is gone."""
    config = engine_config(max_waiting=2, max_requests=1)
    async with running_fleet(config=config) as fleet:
        fleet.runners[1].before_launch = failing_at(1)
        completions = await complete(fleet, prompts_of(6))
        failed = [each for each in completions if each.finish_reason == "error"]
        assert len(failed) == 3
        assert {str(each.stop_reason) for each in failed} == {
            "rank 4 failed: ArithmeticError: the weights are broken"
        }


async def test_replicas_that_share_experts_end_together() -> None:
    """Without those of one, no other can compute a token."""
    async with running_fleet(3, steps_together=True, ends_by_failure=True) as fleet:

        def fail(plan: StepPlan) -> None:
            if plan.step >= 3:
                raise ArithmeticError("the weights are broken")
            fleet.collective.wait()

        fleet.runners[1].before_launch = fail
        with pytest.raises(EngineDeadError, match="rank 4 failed: ArithmeticError"):
            await complete(fleet, prompts_of(6), 50)
        fleet.collective.abort()  # the other threads wait in it, as for a rank of a process that has gone
        for engine in fleet.others:
            with pytest.raises(EngineDeadError, match="rank 4 failed: ArithmeticError"):
                await engine.wait_for_shutdown()


async def test_the_coordinators_failure_ends_every_replica_with_its_cause() -> None:
    """Nobody sends them anything any more."""
    async with running_fleet(3, ends_by_failure=True) as fleet:
        fleet.runners[0].before_launch = failing_at(2)
        with pytest.raises(EngineDeadError, match="ArithmeticError"):
            await complete(fleet, prompts_of(6), 50)
        for engine in fleet.others:
            with pytest.raises(EngineDeadError, match="rank 0 failed: ArithmeticError"):
                await engine.wait_for_shutdown()


@pytest.mark.parametrize("steps_together", [False, True])
async def test_a_shutdown_in_the_middle_of_work_is_no_failure(
    steps_together: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Of no replica: whoever waits hears of a stop, and nothing of one that has failed."""

    async def wait() -> None:
        with pytest.raises(EngineStoppedError, match="the engine was shut down"):
            await complete(fleet, prompts_of(6), 100)

    async with running_fleet(3, steps_together=steps_together) as fleet:
        outbox = await fleet.coordinator.submit([fleet.rig.request([5], 90, is_streamed=True)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await outbox.take()
            await fleet.coordinator.shutdown()
        outbox.close()
        for engine in fleet.others:
            await engine.wait_for_shutdown()
            assert engine.phase is Phase.STOPPED


async def test_a_shutdown_after_a_loss_is_no_failure_either() -> None:
    """What was lost has been dealt with; what it had done still counts."""
    async with running_fleet(3) as fleet:
        await expect_right(fleet, prompts_of(6))
        done = fleet.coordinator.stats().generated_tokens
        await fleet.others[0].shutdown()
        await expect_right(fleet, prompts_of(6))
        assert fleet.coordinator.stats().generated_tokens >= done + 6 * 8


async def test_a_burst_of_many_replicas_output_waits_its_turn() -> None:
    """More than the detokeniser's mailbox holds may lie in the sockets after a stall."""
    async with running_fleet(12) as fleet:
        await expect_right(fleet, prompts_of(48), 60)


async def test_what_could_not_be_queued_here_is_queued_nowhere() -> None:
    """All of a submission or none: nobody would read the rest, and the router would count it for ever."""
    async with running_fleet() as fleet:
        await fleet.coordinator.pause()
        # the router keeps this limit from being met, so it is lowered by hand
        scheduler: Scheduler = vars(fleet.coordinator)["_scheduler"]
        roster: Roster = vars(scheduler)["_roster"]
        vars(roster)["_max_waiting"] = 0
        with pytest.raises(EngineBusy):
            await complete(fleet, prompts_of(6))
        vars(roster)["_max_waiting"] = 100
        await fleet.coordinator.unpause()
        await expect_right(fleet, prompts_of(6), 2)
        assert fleet.num_steps()[1] > 0
        assert fleet.coordinator.stats().generated_tokens == 12


async def test_aborted_output_comes_while_all_are_paused() -> None:
    """A trainer that aborts a rollout reads what there is of it before it goes on."""
    config = replace(engine_config(), shares_prefixes=True, routing_policy="longest_prefix")
    async with running_fleet(config=config) as fleet:
        outboxes = [await fleet.coordinator.submit([fleet.rig.request(each, 100)]) for each in prompts_of(4)]
        await fleet.coordinator.pause("abort")
        parcels = [parcel for outbox in outboxes for parcel in await outbox.take()]
        assert [type(parcel) for parcel in parcels] == [Completion] * 4
        await fleet.coordinator.unpause()


async def test_more_than_all_replicas_hold_is_refused_whole() -> None:
    """Nothing of it is queued anywhere."""
    config = engine_config(max_waiting=3, max_requests=2)
    async with running_fleet(config=config) as fleet:
        with pytest.raises(EngineBusy, match=r"11 requests came, 0 run or wait, the limit is 10"):
            await complete(fleet, prompts_of(11))
        await expect_right(fleet, prompts_of(10))


@pytest.mark.parametrize("steps_together", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_order_of_requests_and_pauses_leaves_every_replica_right(
    seed: int,
    steps_together: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Steps that replicas take together must never wait for one that has come to rest."""
    source = Random(seed)
    async with running_fleet(3, steps_together=steps_together) as fleet:
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                match source.randrange(4):
                    case 0:
                        await fleet.coordinator.pause(source.choice(["keep", "wait"]))
                        tasks.start_soon(expect_right, fleet, prompts_of(2), 4)
                        await fleet.coordinator.unpause()
                    case 1:
                        await fleet.coordinator.suspend()
                        await fleet.coordinator.resume()
                        await fleet.coordinator.unpause()
                    case 2:
                        outbox = await fleet.coordinator.submit([fleet.rig.request([5], 90)])
                        await outbox.take()
                        outbox.close()
                    case _:
                        tasks.start_soon(expect_right, fleet, prompts_of(source.randrange(1, 9)), 12)
        await expect_right(fleet, prompts_of(6), 2)
        assert fleet.coordinator.stats().used_blocks == 0
