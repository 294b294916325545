"""One of several replicas: what it takes from whom, and what its own program may ask of it."""

import pytest

from megallm.core_async.plan.phases import Phase
from tests.loops import EVERY_LOOP
from tests.ranks.in_process_replicas import running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


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
