"""The block pool's suite: each figure is of what it says, and the batch it is compared with stays full."""

import argparse

import pytest

from benchmarks.block_pool import (
    BLOCKS_OF_ROW,
    FEW_BLOCKS,
    OPERATIONS,
    ROWS_AT_ONCE,
    Turns,
    measure_caching,
    run,
)
from benchmarks.steady_batch import SteadyBatch
from megallm.core_async.messages import BlockCounts
from megallm.core_async.plan.block_pool import BlockPool


def counts_of(pool: BlockPool) -> BlockCounts:
    """Gives where the blocks are."""
    pool.check()
    return BlockCounts(pool.num_blocks, pool.num_free, pool.num_cached, pool.num_used)


@pytest.mark.parametrize("changes_prompts", [False, True])
@pytest.mark.parametrize("num_held", [0, 500])
def test_the_blocks_in_use_go_through_each_operation(num_held: int, *, changes_prompts: bool) -> None:
    """A figure of the evict that evicts nothing would be a figure of taking free blocks."""
    turns = Turns(FEW_BLOCKS + num_held, 4, in_use=FEW_BLOCKS)
    figures = turns.measure(2, changes_prompts=changes_prompts)
    assert list(figures) == list(OPERATIONS)
    assert min(figures.values()) > 0
    num_blocks = FEW_BLOCKS + num_held + ROWS_AT_ONCE
    assert counts_of(turns.pool) == BlockCounts(num_blocks, ROWS_AT_ONCE, FEW_BLOCKS, num_held)
    assert FEW_BLOCKS % BLOCKS_OF_ROW == 0


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_steady_batch_stays_full_and_shares_nothing(*, shares_prefixes: bool) -> None:
    """The cost of a cache without a hit is what its users pay for nothing."""
    batch = SteadyBatch(6, 16, shares_prefixes=shares_prefixes)
    assert batch.run(300) > 0
    stats = batch.roster.stats()
    assert (stats.running, stats.preemptions, stats.prefix_hit_rate) == (6, 0, 0)
    assert (stats.cached_blocks > 0) == shares_prefixes
    assert stats.prefill_tokens > 6 * 256


def test_what_caching_adds_is_a_share_of_the_models_step() -> None:
    """Microseconds mean nothing beside no step."""
    figures = measure_caching(4, 16, 50, 10.0)
    assert (figures["batch"], figures["block_size"], figures["step_ms"]) == (4, 16, 10.0)
    assert figures["percent_of_step"] == pytest.approx(figures["added_us"] / 100, rel=0.02)
    assert figures["us_without"] > 0


def test_a_pool_too_small_to_work_in_is_refused() -> None:
    """Its figure would be of other rows than the others'."""
    with pytest.raises(ValueError, match="sizes holds 10; a pool must have at least 1000 blocks"):
        run(argparse.Namespace(sizes=[1000, 10]))
