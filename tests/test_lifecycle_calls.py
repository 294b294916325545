"""The public table of the lifecycle, row by row, on both facades and each way of living."""

import pytest

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.errors import EngineDeadError, EngineStoppedError, LifecycleError
from tests.fake_llm import Driver, Facade, driving, lifecycle_config
from tests.fakes import continuation

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("facade", ["sync", "native", "hosted"]),
]
EVERY_KV_MODE = pytest.mark.parametrize("kv_mode", ["persist", "offload", "recompute"])

CALLS = ["pause", "unpause", "suspend", "resume"]
ENDS = {
    "running": ["paused", "running", "suspended", "running"],
    "paused": ["paused", "running", "suspended", "paused"],
    "suspended": ["suspended", "LifecycleError", "suspended", "paused"],
}
"""Where each of the calls leads."""
ARGUMENTS: dict[str, list[object]] = {"set_generation_epoch": [3]}


async def expect_usable(driver: Driver) -> None:
    """Fails unless the engine answers rightly once it runs, with all its blocks."""
    await driver.enter("running")
    (result,) = await driver.generate([[5, 6]], 4)
    assert result.generated_tokens == continuation([5, 6], 4)
    stats = driver.llm.engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)


# ---- alive ---------------------------------------------------------------------------------------


@EVERY_KV_MODE
@pytest.mark.parametrize("phase", ENDS)
async def test_each_call_from_each_phase_ends_where_the_table_says(
    facade: Facade, kv_mode: KvMode, phase: str
) -> None:
    """Made twice: from where the first led, the second is a row of the same table."""
    async with driving(facade, lifecycle_config(kv_mode)) as driver:
        for call, end in zip(CALLS, ENDS[phase], strict=True):
            await driver.enter(phase)
            at = phase
            for _ in range(2):
                if end == "LifecycleError":
                    with pytest.raises(LifecycleError):
                        await driver.call(call)
                    end = phase
                else:
                    await driver.call(call)
                assert driver.phase == end, f"{call}() from {at}"
                at, end = end, ENDS[end][CALLS.index(call)]
        await expect_usable(driver)
