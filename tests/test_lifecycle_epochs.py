"""Epochs: which weights a token, and a key or value in the cache, come from; and what must not be shared."""

import pytest
from msgspec import structs

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.config import EngineConfig
from tests.fake_llm import Driver, Facade, driving, eventually, lifecycle_config
from tests.fakes import continuation

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("facade", ["sync", "native"]),
]
EVERY_KV_MODE = pytest.mark.parametrize("kv_mode", ["persist", "offload", "recompute"])

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LONG = 40


def sharing(kv_mode: KvMode = "persist") -> EngineConfig:
    """Gives limits with a prefix cache."""
    return structs.replace(lifecycle_config(kv_mode), shares_prefixes=True)


async def pause_at(driver: Driver, step: int, how: str = "pause") -> int:
    """Stops the engine about a step; gives how many tokens the first request has generated."""
    await driver.until_held()
    call = driver.start(driver.call(how))
    await driver.until("pausing")
    driver.runner.go()
    await call.outcome()
    num_steps = len(driver.runner.plans)
    assert step <= num_steps < LONG
    return num_steps


async def test_there_are_no_marks_before_the_first_epoch(facade: Facade) -> None:
    """Upstream's None: who does not train has nothing to tell apart."""
    async with driving(facade) as driver:
        (result,) = await driver.generate([PROMPT])
        assert (result.policy_epoch, result.kv_cache_epoch) == (None, None)


async def test_a_request_of_one_epoch_has_one_mark(facade: Facade) -> None:
    """The marks are sparse."""
    async with driving(facade) as driver:
        for epoch in (0, 7):
            await driver.call("set_generation_epoch", epoch)
            (result,) = await driver.generate([PROMPT])
            assert (result.policy_epoch, result.kv_cache_epoch) == ([(0, epoch)], [(0, epoch)])


@EVERY_KV_MODE
async def test_a_request_that_lives_through_epochs_has_a_mark_for_each(
    facade: Facade, kv_mode: KvMode
) -> None:
    """Each at the last token there was; keys that are computed again are all of the new weights."""
    async with driving(facade, lifecycle_config(kv_mode)) as driver:
        await driver.call("set_generation_epoch", 1)
        marks = [(0, 1)]
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate([PROMPT], LONG))
        for epoch in (2, 3):
            num_tokens = await pause_at(driver, 5 * (epoch - 1), "suspend")
            await driver.call("set_generation_epoch", epoch)
            marks.append((len(PROMPT) + num_tokens - 1, epoch))
            driver.runner.hold(f"step {5 * epoch}")
            await driver.enter("running")
        driver.runner.go()
        (result,) = await generate.outcome()
        assert result.generated_tokens == continuation(PROMPT, LONG)
        assert result.policy_epoch == marks
        assert result.kv_cache_epoch == ([(0, 3)] if kv_mode == "recompute" else marks)


async def test_the_first_epoch_counts_from_the_start_of_what_is_there(facade: Facade) -> None:
    """What came before it is of the only weights there were."""
    async with driving(facade) as driver:
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate([PROMPT], LONG))
        await pause_at(driver, 5)
        await driver.call("set_generation_epoch", 4)
        await driver.call("unpause")
        (result,) = await generate.outcome()
        assert (result.policy_epoch, result.kv_cache_epoch) == ([(0, 4)], [(0, 4)])


async def test_an_epoch_set_while_it_runs_marks_what_is_there(facade: Facade) -> None:
    """Nobody is obliged to pause for it."""
    async with driving(facade) as driver:
        await driver.call("set_generation_epoch", 1)
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate([PROMPT], LONG))
        await driver.until_held()
        await driver.call("set_generation_epoch", 2)
        driver.runner.go()
        (result,) = await generate.outcome()
        assert result.generated_tokens == continuation(PROMPT, LONG)
        first, (place, epoch) = result.policy_epoch
        assert (first, epoch) == ((0, 1), 2)
        assert len(PROMPT) + 3 <= place <= len(PROMPT) + 6, "between what was read and what was planned"
        assert result.kv_cache_epoch == result.policy_epoch


async def test_keys_of_a_request_that_waited_are_of_the_epoch_it_began_in(facade: Facade) -> None:
    """It came in one epoch and was computed in the next."""
    async with driving(facade) as driver:
        await driver.call("set_generation_epoch", 1)
        await driver.call("pause")
        generate = driver.start(driver.generate([PROMPT]))
        await eventually(lambda: driver.llm.engine.stats().waiting)
        await driver.call("set_generation_epoch", 2)
        await driver.call("unpause")
        (result,) = await generate.outcome()
        assert result.policy_epoch == [(0, 1), (len(PROMPT) - 1, 2)]
        assert result.kv_cache_epoch == [(0, 2)]


async def test_keys_of_a_request_that_lost_its_blocks_are_of_the_epoch_it_got_new_ones_in(
    facade: Facade,
) -> None:
    """Preempted for want of blocks: all its tokens are computed again, with the weights of then."""
    config = lifecycle_config(num_blocks=16, max_sequence_length=64)
    async with driving(facade, config) as driver:
        await driver.call("set_generation_epoch", 1)
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate([PROMPT, PROMPT[::-1]], LONG))
        await pause_at(driver, 5)
        await driver.call("set_generation_epoch", 2)
        await driver.call("unpause")
        results = await generate.outcome()
        assert [result.num_evictions for result in results] == [0, 1]
        assert [len(result.policy_epoch) for result in results] == [2, 2]
        assert results[0].kv_cache_epoch == results[0].policy_epoch
        assert results[1].kv_cache_epoch == [(0, 2)]


# ---- the prefix cache ----------------------------------------------------------------------------


async def num_cached(driver: Driver, prompt: list[int]) -> int:
    """Runs a prompt, and gives how many of its tokens were found in the cache."""
    (result,) = await driver.generate([prompt], 4)
    assert result.generated_tokens == continuation(prompt, 4)
    return result.num_cached_tokens


@EVERY_KV_MODE
async def test_an_epoch_empties_the_prefix_cache(facade: Facade, kv_mode: KvMode) -> None:
    """Keys of old weights must not meet queries of new ones: a rollout would belong to no policy."""
    async with driving(facade, sharing(kv_mode)) as driver:
        assert await num_cached(driver, PROMPT) == 0
        assert await num_cached(driver, PROMPT) == 8
        await driver.call("suspend")
        await driver.call("set_generation_epoch", 1)
        await driver.enter("running")
        assert await num_cached(driver, PROMPT) == 0
        assert await num_cached(driver, PROMPT) == 8


@pytest.mark.parametrize(("kv_mode", "found"), [("persist", 8), ("offload", 8), ("recompute", 0)])
async def test_the_prefix_cache_outlives_what_the_contents_outlive(
    facade: Facade, kv_mode: KvMode, found: int
) -> None:
    """A block whose contents are gone must not be found; one that is kept may be."""
    async with driving(facade, sharing(kv_mode)) as driver:
        await num_cached(driver, PROMPT)
        await driver.call("suspend")
        await driver.enter("running")
        assert await num_cached(driver, PROMPT) == found


async def test_blocks_of_a_request_that_lives_through_an_epoch_are_never_shared_again(facade: Facade) -> None:
    """Its old blocks are stale, and so are new ones, whose keys depend on the old."""
    async with driving(facade, sharing()) as driver:
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate([PROMPT], LONG))
        await pause_at(driver, 5)
        await driver.call("set_generation_epoch", 1)
        driver.runner.hold("step 30")
        await driver.call("unpause")
        await pause_at(driver, 30)
        tokens = [*PROMPT, *continuation(PROMPT, 24)]
        same = driver.start(driver.generate([tokens], 4))
        await driver.call("unpause")
        (result,) = await same.outcome()
        assert result.num_cached_tokens == 0
        await generate.outcome()
        assert await num_cached(driver, tokens) == 32, "the second one's blocks are of the new weights"
