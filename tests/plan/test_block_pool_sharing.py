"""The block pool's shared blocks: what is found, who waits for whom, what goes first, and who is admitted."""

from collections.abc import Sequence

import pytest

from megallm.core_async.messages import Row
from tests.plan.batches import Batch, KeyOf, rows_of
from tests.plan.watched_pool import WatchedPool, changes_of

BLOCK_SIZE = 4
A, B, C, D = ([letter] * BLOCK_SIZE for letter in (1, 2, 3, 4))
"""The tokens of whole blocks."""
TAIL = [9]
"""The begin of a block."""


def empty_batch(num_blocks: int = 12, *, keeps_cached: bool = True, max_held: int = 0) -> Batch:
    """Gives a batch without rows."""
    pool = WatchedPool(num_blocks, BLOCK_SIZE, keeps_cached=keeps_cached, max_held=max_held)
    return Batch(pool, BLOCK_SIZE)


def weak_batch(num_blocks: int, key_of: KeyOf) -> Batch:
    """Gives one whose keys collide."""
    return Batch(WatchedPool(num_blocks, BLOCK_SIZE, has_weak_keys=True), BLOCK_SIZE, key_of)


def cached_tokens(batch: Batch, tokens: Sequence[int], *, salt: str = "") -> int:
    """Gives how many tokens of a prompt a request would find, and leaves nothing but their use behind."""
    grant = batch.step(batch.admission(15, tokens, salt=salt))
    assert grant.admitted == [0]
    batch.step(released=[15])
    return grant.num_cached[0]


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_whole_blocks_are_found_and_the_last_token_is_computed(
    num_tokens: int, num_cached: int, *, has_ended: bool
) -> None:
    """Something must be computed to sample from, so a block that ends a prompt is never a hit."""
    batch = empty_batch()
    batch.admit(0, [5] * 16)
    if has_ended:
        batch.step(released=[0])
    assert cached_tokens(batch, [5] * num_tokens) == num_cached


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    """A hit is of all that comes before as well: the third block alone is of no use."""
    batch = empty_batch()
    batch.admit(0, [*A, *B, *C, *TAIL])
    assert cached_tokens(batch, [*A, *B, *D, *TAIL]) == 2 * BLOCK_SIZE
    assert cached_tokens(batch, [*A, *C, *C, *TAIL]) == BLOCK_SIZE
    assert cached_tokens(batch, [*B, *B, *C, *TAIL]) == 0


def test_generated_tokens_are_found_as_well() -> None:
    """The next turn of a conversation begins with the answer to the last."""
    batch = empty_batch()
    batch.admit(0, [*A, 2])
    batch.step(grow={0: 1}, token=2)
    batch.step(grow={0: 2}, token=2)
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 2 * BLOCK_SIZE


def test_rows_that_share_hold_one_block_and_go_on_in_their_own() -> None:
    """No copy on write: a fork writes behind what it shares, never into it."""
    batch = empty_batch()
    batch.admit(0, [*A, *B, *TAIL])
    batch.step()
    batch.admit(1, [*A, *B, *TAIL])
    first, second = batch.pool.table(Row(0)), batch.pool.table(Row(1))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert batch.pool.num_used == 4
    batch.step(released=[0])
    assert batch.pool.num_used == 3
    assert batch.pool.table(Row(1)) == second


def test_the_changes_of_an_admission_are_the_shared_blocks_and_then_the_new_ones() -> None:
    """The ranks rebuild the table from the changes alone."""
    batch = empty_batch()
    batch.admit(0, [*A, *B])
    grant = batch.step(batch.admission(1, [*A, *B, *C]))
    table = batch.pool.table(Row(1))
    assert changes_of(grant) == [(Row(1), 0, table[:2]), (Row(1), 2, table[2:])]


def test_no_more_is_taken_from_the_cache_than_a_request_allows() -> None:
    """A prompt whose log-probs are wanted has to be computed, cached or not."""
    batch = empty_batch()
    batch.admit(0, [*A, *B, *C, *TAIL])
    grant = batch.step(batch.admission(1, [*A, *B, *C, *TAIL], max_cached=0))
    assert (grant.num_cached, grant.num_chunk) == ([0], [13])
    grant = batch.step(batch.admission(2, [*A, *B, *C, *TAIL], max_cached=11))
    assert (grant.num_cached, grant.num_chunk) == ([8], [5])


def test_another_salt_finds_nothing() -> None:
    """A tenant must not learn from the time to the first token what another has asked."""
    batch = empty_batch()
    batch.admit(0, [*A, *B, *TAIL], salt="red")
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 0
    assert cached_tokens(batch, [*A, *B, *TAIL], salt="blue") == 0
    assert cached_tokens(batch, [*A, *B, *TAIL], salt="red") == 2 * BLOCK_SIZE


def test_a_preempted_row_finds_its_own_blocks_again() -> None:
    """What yields computes again only what others have taken in the meantime."""
    batch = empty_batch(8)
    batch.admit(0, [1])
    batch.admit(1, [*A, *B, *C, *TAIL])
    grant = batch.step(grow={0: 20})
    assert grant.preempted == rows_of(1)
    batch.step(released=[0])
    assert cached_tokens(batch, [*A, *B, *C, *TAIL]) == 2 * BLOCK_SIZE


# ---- who waits for whom --------------------------------------------------------------------------


def test_a_request_waits_for_the_blocks_that_another_computes() -> None:
    """Copies of a prompt that come at once compute it once; whoever has no part in it goes past them."""
    batch = empty_batch()
    prompt = [*A, *B, *TAIL]
    grant = batch.step(
        batch.admission(0, prompt), batch.admission(1, prompt), batch.admission(2, [*C, *TAIL])
    )
    assert grant.admitted == [0, 2]
    grant = batch.step(batch.admission(1, prompt), batch.admission(3, prompt))
    assert (grant.admitted, grant.num_cached, grant.num_chunk) == ([0, 1], [8, 8], [1, 1])


def test_a_request_waits_until_all_that_it_may_share_is_computed() -> None:
    """It would compute the second half itself if it began after the first."""
    batch = empty_batch()
    prompt = [*A, *B, *TAIL]
    batch.step(batch.admission(0, prompt), budget=BLOCK_SIZE)
    assert batch.step(batch.admission(1, prompt)).admitted == []
    batch.step(grow={0: 4})
    grant = batch.step(batch.admission(1, prompt))
    assert (grant.admitted, grant.num_cached) == ([0], [8])


def test_nobody_waits_for_a_block_that_could_not_be_shared() -> None:
    """The block that ends a prompt is computed anew anyhow."""
    batch = empty_batch()
    grant = batch.step(batch.admission(0, [*A, *TAIL]), batch.admission(1, A))
    assert grant.admitted == [0, 1]


def test_nobody_waits_for_a_row_that_has_ended_or_yielded() -> None:
    """What is not coming any more would be waited for without end."""
    batch = empty_batch(6)
    prompt = [*A, *B, *TAIL]
    batch.step(batch.admission(0, prompt), budget=2)
    grant = batch.step(batch.admission(1, prompt), released=[0])
    assert (grant.admitted, grant.num_cached) == ([0], [0])

    batch = empty_batch(6)
    batch.admit(0, [7])
    batch.step(batch.admission(1, prompt), budget=2)
    assert batch.step(grow={0: 20}).preempted == rows_of(1)
    grant = batch.step(batch.admission(1, prompt), released=[0])
    assert (grant.admitted, grant.num_cached) == ([0], [0])


def test_the_end_of_a_copy_does_not_end_the_wait_for_the_first() -> None:
    """Both compute the block that ends their prompt; one of them still will have it."""
    batch = empty_batch()
    batch.step(batch.admission(0, [*A, *B]), budget=7)
    batch.step(batch.admission(1, [*A, *B]), budget=2)
    assert batch.step(batch.admission(2, [*A, *B, *TAIL]), released=[1]).admitted == []
    batch.step(grow={0: 1})
    assert batch.step(batch.admission(2, [*A, *B, *TAIL])).num_cached == [8]


def test_nobody_waits_for_a_row_whose_blocks_are_of_old_weights() -> None:
    """They will never be known."""
    batch = empty_batch()
    prompt = [*A, *B, *TAIL]
    batch.step(batch.admission(0, prompt), budget=2)
    batch.forget()
    grant = batch.step(batch.admission(1, prompt))
    assert (grant.admitted, grant.num_cached) == ([0], [0])


# ---- what goes first -----------------------------------------------------------------------------


def test_leaves_are_evicted_before_their_parents() -> None:
    """A child without its parent is found by nobody."""
    batch = empty_batch(6)
    batch.admit(0, [*A, *B, *C, *TAIL])
    batch.step(released=[0])
    assert batch.pool.num_cached == 3
    for num_cached in (2, 1, 0):
        batch.step(batch.admission(1, [8] * (6 - num_cached) * BLOCK_SIZE, shares=False))
        batch.step(released=[1])
        assert batch.pool.num_cached == num_cached
        assert cached_tokens(batch, [*A, *B, *C, *TAIL][: 4 * num_cached + 1]) == 4 * num_cached


def test_the_prefix_used_longest_ago_is_evicted_first() -> None:
    """A hit counts as use: a shared system prompt stays while others come and go."""
    batch = empty_batch(6)
    for row, block in enumerate((A, B, C)):
        batch.admit(row, [*block, *TAIL])
        batch.step(released=[row])
    assert cached_tokens(batch, [*A, *TAIL]) == BLOCK_SIZE
    batch.step(batch.admission(1, [8] * 4 * BLOCK_SIZE, shares=False))
    batch.step(released=[1])
    assert batch.pool.num_cached == 2
    assert cached_tokens(batch, [*A, *TAIL]) == BLOCK_SIZE
    assert cached_tokens(batch, [*C, *TAIL]) == BLOCK_SIZE
    assert cached_tokens(batch, [*B, *TAIL]) == 0


def test_free_blocks_are_taken_before_cached_ones() -> None:
    """What nobody can find is worth nothing."""
    batch = empty_batch(6)
    batch.admit(0, [*A, *B, *TAIL])
    batch.step(released=[0])
    batch.step(batch.admission(1, [8] * 3 * BLOCK_SIZE, shares=False))
    assert (batch.pool.num_free, batch.pool.num_cached) == (1, 2)


def test_the_free_block_used_last_is_taken_first() -> None:
    """It is the likeliest to be in the device's caches, and a table given back is taken in its order."""
    batch = empty_batch()
    batch.step(batch.admission(0, [8] * 8, shares=False))
    table = batch.pool.table(Row(0))
    batch.step(batch.admission(1, [8] * 8, shares=False), released=[0])
    assert batch.pool.table(Row(1)) == table


def test_a_copy_of_a_block_takes_the_place_of_one_that_was_evicted() -> None:
    """The block that ends a prompt is computed by each request; what follows is found behind any of them."""
    batch = empty_batch(6)
    batch.admit(0, A)
    batch.admit(1, A)
    batch.step(grow={1: 4}, released=[0], token=2)
    assert batch.pool.num_cached == 1
    batch.step(batch.admission(2, [8] * 3 * BLOCK_SIZE, shares=False))
    batch.step(grow={2: 4})
    assert batch.pool.num_cached == 0
    batch.step(released=[2])
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 2 * BLOCK_SIZE
    batch.step(released=[1])
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 2 * BLOCK_SIZE


def test_the_use_of_a_copy_is_a_use_of_the_block_that_is_found() -> None:
    """Else it would go before its children, and they would be left for nobody to find."""
    batch = empty_batch(6)
    batch.admit(0, A)
    batch.admit(1, A)
    batch.step(grow={1: 4}, released=[0], token=2)
    batch.step(released=[1])
    assert batch.pool.num_cached == 2
    batch.step(batch.admission(2, [8] * 5 * BLOCK_SIZE, shares=False))
    batch.step(released=[2])
    assert cached_tokens(batch, [*A, *TAIL]) == BLOCK_SIZE


def test_without_a_cache_blocks_are_shared_while_somebody_holds_them() -> None:
    """REF_ZERO: forks share, and the last one that ends frees all at once."""
    batch = empty_batch(keeps_cached=False)
    batch.admit(0, [*A, *B, *TAIL])
    batch.step()
    assert batch.admit(1, [*A, *B, *TAIL]) == 2 * BLOCK_SIZE
    batch.step(released=[0])
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 2 * BLOCK_SIZE
    batch.step(released=[1])
    assert (batch.pool.num_free, batch.pool.num_cached) == (12, 0)
    assert cached_tokens(batch, [*A, *B, *TAIL]) == 0


def test_nothing_is_shared_across_a_change_of_the_weights() -> None:
    """Neither what was computed before, nor what a running row adds to it; new rows share with each other."""
    batch = empty_batch()
    batch.admit(0, [*A, *TAIL])
    batch.admit(1, [*B, *TAIL])
    batch.step(released=[1])
    batch.forget()
    assert (batch.pool.num_cached, batch.pool.num_free) == (0, 10)
    batch.step(grow={0: 3}, token=9)
    assert cached_tokens(batch, [*B, *TAIL]) == 0
    batch.step(released=[0])
    assert (batch.pool.num_cached, batch.pool.num_used) == (1, 0), "the B block, computed anew"
    assert cached_tokens(batch, [*A, *[9] * 4, *TAIL]) == 0
    assert cached_tokens(batch, [*A, *[9] * 4, *TAIL]) == 2 * BLOCK_SIZE


# ---- keys that collide (CVE-2025-25183) ----------------------------------------------------------


def one_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Gives the same key for all blocks of one depth."""
    return bytes([parent[0] + 1])


def test_a_collision_is_not_served() -> None:
    """The answer to another's prompt is what a caller who finds a collision would get."""
    batch = weak_batch(12, one_key)
    batch.admit(0, [*A, *TAIL])
    batch.step()
    assert batch.admit(1, [*B, *TAIL]) == 0
    assert cached_tokens(batch, [*A, *TAIL]) == BLOCK_SIZE
    assert cached_tokens(batch, [*B, *TAIL]) == 0


def test_what_follows_a_collision_is_not_served_either() -> None:
    """The second block's tokens and its parent's key are right; the parent's tokens are another's."""
    batch = weak_batch(12, one_key)
    batch.admit(0, [*A, *TAIL])
    batch.step()
    batch.admit(1, [*B, *C, *TAIL])
    batch.step()
    assert cached_tokens(batch, [*A, *C, *TAIL]) == BLOCK_SIZE


def test_a_collision_is_not_served_after_the_first_of_its_key_was_evicted() -> None:
    """A row goes on behind its copy of that one: the key must not come to stand for another prefix."""
    batch = weak_batch(10, one_key)
    batch.admit(0, A)
    batch.admit(1, A)  # its block is a copy: it holds nothing that is found
    batch.step(released=[0])
    batch.step(batch.admission(2, [8] * 8 * BLOCK_SIZE, shares=False))
    batch.step(grow={2: 4})
    assert batch.pool.num_cached == 0
    batch.step(released=[2])
    batch.admit(0, [*B, *TAIL])
    batch.step(grow={1: 4}, token=3)
    assert cached_tokens(batch, [*B, *C, *TAIL]) == 0
    assert cached_tokens(batch, [*A, *C, *TAIL]) == 2 * BLOCK_SIZE
