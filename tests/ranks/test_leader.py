"""The leader: to its engine one worker, whose plans every rank runs and whose end all ranks share."""

import anyio
import pytest

from megallm.core_async.errors import EngineDeadError, RankLostError
from megallm.core_async.messages import ReleaseCache, RestoreCache, StepPlan, pack_ints
from megallm.core_async.plan.phases import Phase
from tests.fakes import continuation
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import Pair, new_pair, running_pair

pytestmark = [pytest.mark.anyio, EVERY_LOOP]

PROMPTS = [[1, 2, 3], [7], list(range(40)), [9, 9]]


async def causes_of(pair: Pair) -> list[str]:
    """Gives the cause that each rank's engine ended with, once both have."""
    causes: list[str] = []
    for engine in (pair.leading.engine, pair.follower):
        with pytest.raises(EngineDeadError) as caught:
            await engine.wait_for_shutdown()
        assert isinstance(caught.value.__cause__, RankLostError)
        causes.append(str(caught.value.__cause__))
    return causes


def breaking(pair: Pair, runner_place: int) -> None:
    """Makes one rank's forward pass raise from now on."""

    def fail(plan: StepPlan) -> None:
        raise ArithmeticError("the weights are broken")

    (pair.leading.runner, pair.follower_runner)[runner_place].before_launch = fail


async def test_every_rank_runs_every_plan_for_one_frame_a_step() -> None:
    """The others have the same blocks, rows and tokens, or the ranks' parts of a step do not fit."""
    async with running_pair() as pair:
        frames, _ = pair.leader.traffic
        rig = pair.leading
        completions = await rig.complete(*(rig.request(prompt) for prompt in PROMPTS))
        assert [each.token_ids for each in completions] == [continuation(prompt, 8) for prompt in PROMPTS]
        assert pair.leader.traffic[0] - frames == len(rig.runner.plans)
    assert pair.follower_runner.plans == rig.runner.plans


async def test_a_stop_lets_every_rank_end_the_steps_in_flight() -> None:
    """A rank whose plan was dropped would leave the others in a collective."""
    async with running_pair() as pair:
        outbox = await pair.leading.engine.submit([pair.leading.request([1, 2], 100, is_streamed=True)])
        await outbox.take()
        await pair.leading.engine.shutdown()
        await pair.follower.wait_for_shutdown()
        outbox.close()
    assert pair.follower_runner.plans == pair.leading.runner.plans
    assert pair.follower_runner.is_closed
    assert pair.leading.runner.is_closed
    assert pair.follower.phase is Phase.STOPPED


@pytest.mark.parametrize("place", [0, 1])
async def test_a_rank_that_raises_ends_all_with_the_same_cause(place: int) -> None:
    """Which names it: the others' errors are consequences."""
    async with running_pair() as pair:
        breaking(pair, place)
        with pytest.raises(EngineDeadError):
            await pair.leading.tokens_of([1, 2, 3])
        pair.collective.abort()  # the thread of the other one waits there
        causes = await causes_of(pair)
    assert causes == [f"rank {4 + place} failed: ArithmeticError: the weights are broken"] * 2


async def test_the_cache_of_every_rank_is_given_back_and_taken() -> None:
    """A suspend that leaves one rank's memory taken is none."""
    async with running_pair() as pair:
        await pair.leader.address.ask(ReleaseCache(pack_ints([3, 5])))
        assert pair.follower_runner.is_released
        assert pair.leading.runner.is_released
        assert pair.leading.runner.kept == pair.follower_runner.kept == [3, 5]
        await pair.leader.address.ask(RestoreCache())
        assert not pair.follower_runner.is_released
        assert not pair.leading.runner.is_released


@pytest.mark.parametrize("place", [0, 1])
async def test_a_rank_that_does_not_start_ends_the_start_of_all(place: int) -> None:
    """With its name: each rank's program has to say why it ends."""
    pair = new_pair()

    def fail() -> None:
        raise MemoryError("no room")

    (pair.leading.runner, pair.follower_runner)[place].start = fail
    errors = ["", ""]

    async def start(starting: int) -> None:
        try:
            await (pair.leading.engine, pair.follower)[starting].run()
        except (MemoryError, RankLostError) as error:
            errors[starting] = str(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start, 0)
        tasks.start_soon(start, 1)
    assert errors[place] == "no room"
    assert errors[1 - place] in (
        f"rank {4 + place} did not start: no room",
        f"rank {4 + place} failed: MemoryError: no room",
    )


async def test_a_leader_that_stops_at_once_lets_every_rank_start_first() -> None:
    """Construction returns on all ranks or on none."""
    async with running_pair() as pair:
        await pair.leading.engine.shutdown()
        await pair.follower.wait_for_shutdown()
    assert pair.follower.phase is Phase.STOPPED
