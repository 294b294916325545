"""Who runs first, who yields, and who may pass whom: the scheduler's and the allocator's rules together."""

from random import Random

import pytest

from megallm.core_async.plan.policy import MAX_PASSES
from tests.actors.scheduling import Prompt, Pump, limits, pumping

pytestmark = pytest.mark.anyio


def admissions(pump: Pump) -> list[list[int]]:
    """Gives who got a row, for each step in which somebody did."""
    return [[setup.sampling.seed for setup in plan.new_rows] for plan in pump.plans if plan.new_rows]


async def test_those_that_yield_come_back_in_the_order_they_came() -> None:
    """Taking all blocks away must not turn the line round, nor let in those that came later."""
    async with pumping(limits(max_requests=3)) as pump:
        accounts = await pump.submit(*[Prompt((key,), 6) for key in range(4)])
        for _ in range(4):
            await pump.turn()
        await pump.lose_the_cache()
        assert (pump.stats.used_blocks, pump.stats.running) == (3, 3), "as of the last step"
        await pump.run()
        for account in accounts:
            account.check()
        await pump.check_all_free()
    assert admissions(pump)[:3] == [[1, 2, 3], [1, 2, 3], [4]]
    assert [account.ending.num_preemptions for account in accounts if account.ending] == [1, 1, 1, 0]


async def test_a_shortage_takes_from_the_last_and_changes_no_output() -> None:
    """The first always gets on: it is never asked to yield."""
    async with pumping(limits(max_requests=4, block_size=1), num_blocks=12) as pump:
        accounts = await pump.submit(*[Prompt((key, key, key), 8) for key in range(4)])
        await pump.run()
        for account in accounts:
            account.check()
        await pump.check_all_free()
    num_preemptions = [account.ending.num_preemptions for account in accounts if account.ending]
    assert num_preemptions[0] == 0
    assert sum(num_preemptions) == pump.stats.preemptions > 2


async def test_small_requests_pass_a_big_one_only_so_often() -> None:
    """Filling gaps is good until the one that does not fit would wait for ever."""
    async with pumping(limits(max_tokens=8, max_requests=8, block_size=1), num_blocks=16) as pump:
        await pump.submit(*[Prompt((1, 1, 1, 1, 1, 1), 3)] * 2)
        await pump.turn()
        (big,) = await pump.submit(Prompt((7,) * 12, 3))
        (small,) = await pump.submit(Prompt((2,), 4))
        while not big.num_admissions:
            await pump.turn()
            if small.num_admissions:
                (small,) = await pump.submit(Prompt((2,), 4))
            assert len(pump.accounts) < 3 * MAX_PASSES, "the big one never runs"
        assert big.num_passes == MAX_PASSES
        await pump.run()
        big.check()


async def test_a_lower_priority_number_is_admitted_first_and_yields_last() -> None:
    """Within one priority it stays first come, first served."""
    async with pumping(limits(max_requests=1)) as pump:
        prompts = [Prompt((key,), 2, priority=priority) for key, priority in enumerate([1, 1, 0, 0])]
        await pump.submit(*prompts)
        await pump.run()
    assert admissions(pump) == [[3], [4], [1], [2]]


@pytest.mark.parametrize("attempt", range(4))
async def test_those_that_yield_at_once_keep_their_order(attempt: int) -> None:
    """Two lose their blocks in one step; the order in which they wait must not be left to chance."""
    async with pumping(limits(max_requests=8, block_size=1), num_blocks=8) as pump:
        accounts = await pump.submit(*[Prompt((attempt + key,), 3) for key in range(5)])
        await pump.run()
        for account in accounts:
            account.check()
    assert admissions(pump) == [[1, 2, 3, 4], [3, 4], [5]]


async def test_one_that_is_preferred_grows_before_those_that_decode() -> None:
    """Its prompt, begun later and taken in chunks, comes before the tokens of the other in every grant."""
    async with pumping(limits(max_tokens=4, block_size=1, chunks_prompts=True), num_blocks=17) as pump:
        (other,) = await pump.submit(Prompt((1, 2), 9, priority=1))
        await pump.turn()
        await pump.turn()
        (preferred,) = await pump.submit(Prompt(tuple(range(12)), 2))
        await pump.run()
        other.check()
        preferred.check()
        await pump.check_all_free()
    assert [account.ending.num_preemptions for account in (other, preferred) if account.ending] == [1, 0]


async def test_an_admission_leaves_those_that_run_a_block_each_to_grow() -> None:
    """It would be the first to yield in the very next step, and would have been computed for nothing."""
    async with pumping(num_blocks=4) as pump:
        (running,) = await pump.submit(Prompt((1, 2, 3), 5))
        await pump.turn()
        (waiting,) = await pump.submit(Prompt(tuple(range(12)), 1))
        while running.ending is None:
            await pump.turn()
            assert running.ending is not None or not waiting.num_admissions
        await pump.run()
        running.check()
        waiting.check()
    assert pump.stats.preemptions == 0


@pytest.mark.parametrize("chunks_prompts", [False, True])
async def test_two_hundred_that_wait_for_a_full_cache_all_finish_in_bounded_rounds(
    *, chunks_prompts: bool
) -> None:
    """Ten times what fits: each gets its turn, and batching costs nobody more than turns one by one would."""
    random = Random(7)
    prompts = [
        Prompt(tuple(random.randrange(97) for _ in range(random.randint(1, 40))), random.randint(1, 30))
        for _ in range(200)
    ]
    bounds = limits(max_tokens=64, max_requests=16, chunks_prompts=chunks_prompts)
    async with pumping(bounds, num_blocks=20) as pump:
        accounts = await pump.submit(*prompts)
        await pump.run()
        assert pump.stats.waiting == pump.stats.running == 0
        for account in accounts:
            account.check()
            assert account.num_passes <= MAX_PASSES + 1
        one_by_one = sum(1 + prompt.num_new for prompt in prompts)
        assert pump.stats.step < one_by_one
        assert pump.stats.preemptions > 0, "the cache was never short"
        await pump.check_all_free()
