"""The tally: what it counts is what the engine's figures say."""

from megallm.core_async.messages import EngineStats
from megallm.core_async.plan.tally import Tally
from tests.plan.requests import request_of


def test_a_new_engine_has_all_its_blocks_and_no_sums() -> None:
    """Whoever looks before the first step sees what the first step will find."""
    assert Tally(8).stats(running=0, waiting=2) == EngineStats(waiting=2, free_blocks=8)


def test_only_requests_whose_prefix_is_looked_up_count_for_the_hit_rate() -> None:
    """Else a fork among requests that share nothing would look like a bad cache."""
    tally = Tally(8)
    tally.admit(request_of(1, range(6)), 0)
    sharing = request_of(2, range(8))
    sharing.shares_prefix = True
    tally.admit(sharing, 4)
    stats = tally.stats(running=2, waiting=0)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prefix_hit_rate) == (8, 4, 0.5)
    assert tally.num_admissions == 2


def test_a_block_is_used_when_it_is_neither_free_nor_cached() -> None:
    """A scrape that adds the three up gets the pool."""
    tally = Tally(8)
    tally.num_free, tally.num_cached_blocks = 3, 4
    stats = tally.stats(running=1, waiting=0)
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (1, 4, 3)
