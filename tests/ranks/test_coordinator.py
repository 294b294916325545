"""Requests of one program run on several replicas, and nobody can tell."""

import anyio
import pytest

from tests.engines import engine_config
from tests.fakes import continuation
from tests.loops import EVERY_LOOP
from tests.ranks.in_process_replicas import running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


@pytest.mark.parametrize("steps_together", [False, True])
async def test_requests_run_on_every_replica_and_give_what_one_gives(steps_together: bool) -> None:
    """The load is shared; the tokens are those of a single engine."""
    async with running_fleet(3, steps_together=steps_together) as fleet:
        prompts = [[number, number + 1] for number in range(12)]
        requests = [fleet.rig.request(prompt) for prompt in prompts]
        completions = await fleet.rig.complete(*requests)
        assert [each.token_ids for each in completions] == [continuation(prompt, 8) for prompt in prompts]
        assert min(fleet.num_steps()) > 0
        stats = fleet.coordinator.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.generated_tokens == 12 * 8


async def test_lifecycle() -> None:
    """Every replica."""
    async with running_fleet(2) as fleet, anyio.create_task_group() as tasks:
        for call in ("pause", "suspend", "resume", "unpause"):
            for calls in fleet.calls:
                tasks.start_soon(getattr(calls, call))
            await anyio.wait_all_tasks_blocked()


_ = engine_config
