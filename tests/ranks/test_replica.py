"""One of several replicas: what it takes from whom, and what its own program may ask of it."""

import anyio
import pytest

from megallm.core_async.errors import EngineStoppedError
from megallm.core_async.plan.phases import Phase
from tests.loops import EVERY_LOOP
from tests.ranks.in_process_replicas import running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_only_the_coordinator_takes_requests() -> None:
    """Others say who does."""
    async with running_fleet() as fleet:
        with pytest.raises(RuntimeError, match="rank 4 runs what rank 0 sends it"):
            await fleet.others[0].submit([fleet.rig.request([1])])
    with pytest.raises(EngineStoppedError):
        await fleet.calls[1].pause()


async def test_its_program_waits_for_the_coordinators_shutdown() -> None:
    """It has nothing else to do, and its process must not end before."""
    async with running_fleet() as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.calls[1].wait_for_leader)
        await anyio.wait_all_tasks_blocked()
        assert fleet.others[0].phase is Phase.RUNNING
        await fleet.coordinator.shutdown()
    assert fleet.others[0].phase is Phase.STOPPED


async def test_it_asks_for_nothing_by_itself_when_a_call_is_cut_short() -> None:
    """The coordinator makes it go on, and it alone."""
    async with running_fleet() as fleet:
        await fleet.coordinator.suspend()
        fleet.others[0].go_on()
        assert fleet.others[0].phase is Phase.SUSPENDED
        fleet.coordinator.go_on()
        await fleet.coordinator.unpause()
        completions = await fleet.rig.complete(*(fleet.rig.request([each]) for each in range(4)))
        assert {each.finish_reason for each in completions} == {"length"}
