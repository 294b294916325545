"""Who the block pool admits: what fits the budget and leaves the running rows room to grow, in order."""

import pytest

from megallm.core_async.messages import Row
from tests.plan.batches import Batch, rows_of
from tests.plan.watched_pool import WatchedPool

BLOCK_SIZE = 4


def batch_of(num_blocks: int, *held: int) -> Batch:
    """Gives rows 0, 1, ... that have filled so many blocks, and share none."""
    batch = Batch(WatchedPool(num_blocks, BLOCK_SIZE), BLOCK_SIZE)
    batch.step(*[batch.admission(row, [1], shares=False) for row in range(len(held))])
    batch.step(grow={row: count * BLOCK_SIZE - 1 for row, count in enumerate(held)})
    assert [len(batch.pool.table(row)) for row in batch.rows] == list(held)
    return batch


def prompt(num_blocks: int, token: int = 7) -> list[int]:
    """Gives tokens that fill so many blocks."""
    return [token] * num_blocks * BLOCK_SIZE


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(3, True), (4, False)])
def test_a_block_for_each_running_row_stays_out_of_what_is_granted(
    num_blocks: int, *, is_admitted: bool
) -> None:
    """A newcomer that takes the last block is preempted as soon as anybody grows."""
    batch = batch_of(12, 4, 3)
    grant = batch.step(batch.admission(2, prompt(num_blocks)))
    assert bool(grant.admitted) == is_admitted


def test_an_empty_engine_admits_what_fills_the_cache() -> None:
    """The longest request that the limits allow must run some day."""
    batch = batch_of(12)
    assert batch.step(batch.admission(0, prompt(12))).admitted == [0]


def test_an_admission_never_preempts() -> None:
    """A newcomer that takes from a running request would only be preempted by it in turn."""
    batch = batch_of(12, 6, 5)
    grant = batch.step(batch.admission(2, prompt(2)))
    assert (grant.admitted, grant.preempted) == ([], [])
    assert grant.num_free == 1


def test_the_first_admission_that_does_not_fit_ends_the_granting() -> None:
    """A short prompt that overtakes a long one, again and again, starves it."""
    batch = batch_of(12, 4)
    grant = batch.step(*[batch.admission(row, prompt(size, row)) for row, size in [(1, 2), (2, 5), (3, 1)]])
    assert grant.admitted == [0]
    assert grant.changed_rows == rows_of(1)


def test_one_that_may_be_passed_is_passed() -> None:
    """The room that the head can't use is of use to somebody smaller."""
    batch = batch_of(12, 4)
    sizes = [(1, 2, False), (2, 5, True), (3, 1, False), (4, 5, False), (5, 1, False)]
    grant = batch.step(
        *[batch.admission(row, prompt(size, row), may_be_passed=may) for row, size, may in sizes]
    )
    assert grant.admitted == [0, 2]


def test_running_rows_come_before_admissions() -> None:
    """The last block goes to the one whose work is under way."""
    batch = batch_of(12, 5, 4)
    grant = batch.step(batch.admission(2, [1]), grow={1: 1})
    assert (grant.admitted, grant.preempted, grant.changed_rows) == ([], [], rows_of(1))


def test_a_prompt_that_may_be_split_takes_what_the_budget_leaves() -> None:
    """It gets blocks for its first chunk alone: the rest may go to others until it comes to it."""
    batch = batch_of(12)
    grant = batch.step(batch.admission(0, prompt(3)), batch.admission(1, prompt(3, 8)), budget=18)
    assert (grant.admitted, grant.num_chunk) == ([0, 1], [12, 6])
    assert [len(batch.pool.table(row)) for row in rows_of(0, 1)] == [3, 2]


def test_a_prompt_that_must_not_be_split_waits_for_a_budget_that_holds_it() -> None:
    """Where chunks are off a prompt is one forward pass."""
    batch = batch_of(12)
    admissions = [batch.admission(row, prompt(3, row), may_split=False) for row in (0, 1)]
    grant = batch.step(*admissions, budget=18)
    assert (grant.admitted, grant.num_chunk) == ([0], [12])


def test_nothing_is_granted_without_a_budget() -> None:
    """A row without a token to compute would hold blocks for nothing."""
    batch = batch_of(12)
    assert batch.step(batch.admission(0, prompt(1)), budget=0).admitted == []


def test_a_hit_costs_no_budget() -> None:
    """Only what is computed counts: a long prompt that is cached fits a step at once."""
    batch = batch_of(12)
    batch.admit(0, [*prompt(3), 1])
    batch.step()
    grant = batch.step(batch.admission(1, [*prompt(3), 1], may_split=False), budget=1)
    assert (grant.admitted, grant.num_cached, grant.num_chunk) == ([0], [12], [1])


def test_a_hit_on_a_held_block_takes_no_room() -> None:
    """Two that share count the shared blocks once, so more of them fit."""
    batch = batch_of(6)
    batch.admit(0, [*prompt(4), 1])
    grant = batch.step(batch.admission(1, [*prompt(4), 2]))
    assert grant.admitted == []
    batch.step(released=[0])
    batch.admit(0, [*prompt(3), 1])
    batch.step()
    grant = batch.step(batch.admission(1, [*prompt(3), 2]))
    assert (grant.admitted, grant.num_cached) == ([0], [12])
    assert batch.pool.num_used == 5


def test_a_hit_on_a_block_that_nobody_holds_takes_its_room() -> None:
    """The found blocks can't be evicted for the request's own new ones."""
    batch = batch_of(6)
    batch.admit(0, [*prompt(4), 1])
    batch.step(released=[0])
    batch.admit(1, [9])
    grant = batch.step(batch.admission(0, [*prompt(4), 2]))
    assert grant.admitted == []
    grant = batch.step(batch.admission(0, [*prompt(3), 2]))
    assert (grant.admitted, grant.num_cached) == ([0], [12])


def test_cached_blocks_make_room_for_a_newcomer() -> None:
    """The cache takes nothing from anybody: it is what is left over."""
    batch = batch_of(6)
    batch.admit(0, [*prompt(5), 1])
    batch.step(released=[0])
    assert batch.pool.num_cached == 5
    assert batch.step(batch.admission(1, [9] * 6 * BLOCK_SIZE)).admitted == [0]
    assert batch.pool.num_cached == 0
    assert len(batch.pool.table(Row(1))) == 6
