"""The start of several replicas: all of them, or none, and every one says why."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from megallm.core_async.errors import EngineStoppedError, RankLostError
from megallm.core_async.transport.ranks import RankStream
from megallm.core_async.transport.replica_frames import FromCoordinator
from tests.loops import EVERY_LOOP
from tests.ranks.in_process_replicas import Fleet, new_fleet, running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def starts_of(fleet: Fleet) -> list[str]:
    """Gives what the start of each replica ended with, by place."""
    outcomes: dict[int, str] = {}

    async def run(place: int, run_engine: Callable[[], Awaitable[None]]) -> None:
        try:
            await run_engine()
        except (ArithmeticError, RankLostError, EngineStoppedError) as error:
            outcomes[place] = f"{type(error).__name__}: {error}"

    async with anyio.create_task_group() as tasks:
        for place, engine in enumerate((fleet.coordinator, *fleet.others)):
            tasks.start_soon(run, place, engine.run)
    return [outcomes[place] for place in range(len(outcomes))]


def refuse() -> None:
    """Is the start of a model that does not fit."""
    raise ArithmeticError("no room")


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_replica_that_does_not_start_ends_the_start_of_all(failing: int) -> None:
    """An engine with fewer replicas than asked for would only be found out when it is slow."""
    fleet = new_fleet(2)
    fleet.runners[failing].start = refuse
    outcomes = await starts_of(fleet)
    # of a replica of one rank, which is that rank's worker
    rank = (0, 4)[failing]
    assert f"rank {rank} " in outcomes[1 - failing]
    assert "no room" in outcomes[1 - failing]
    assert "no room" in outcomes[failing]


async def test_every_replica_stops_with_the_coordinator_and_says_so() -> None:
    """A stop is no failure."""
    async with running_fleet(3) as fleet:
        await fleet.coordinator.shutdown()
        for engine in fleet.others:
            await engine.wait_for_shutdown()
            with pytest.raises(EngineStoppedError, match="the engine was shut down"):
                engine.check_alive()


async def test_a_replica_whose_program_ends_it_is_lost_and_no_other() -> None:
    """As one whose process has gone."""
    async with running_fleet(3) as fleet:
        await fleet.others[0].shutdown()
        completions = await fleet.rig.complete(*(fleet.rig.request([each]) for each in range(6)))
        assert {each.finish_reason for each in completions} == {"length"}
        assert list(fleet.coordinator.replicas.links) == [2]


async def test_a_submission_is_one_frame_there_and_a_step_one_frame_back() -> None:
    """However many requests: what the coordinator's loop does for a replica must not grow with them."""
    async with running_fleet() as fleet:
        link = fleet.coordinator.replicas.links[1]
        back: RankStream[FromCoordinator] = vars(fleet.others[0])["_leader"]
        for count in (2, 24):
            sent, returned, steps = link.stream.num_frames, back.num_frames, fleet.num_steps()[1]
            await fleet.rig.complete(*(fleet.rig.request([each], 20) for each in range(count)))
            assert link.stream.num_frames - sent == 1
            # and one that says that the replica has come to rest
            assert back.num_frames - returned <= fleet.num_steps()[1] - steps + 2
