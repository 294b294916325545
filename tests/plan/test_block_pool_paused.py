"""The block pool's paused buffer: who sits out and keeps its blocks, and who yields all the same."""

from tests.plan.batches import rows_of
from tests.plan.test_block_pool import BLOCK_SIZE, filled, sizes


def test_a_short_row_sits_out_while_the_paused_buffer_has_room_for_it() -> None:
    """What it computed is not lost for want of one block that others are about to give back."""
    batch = filled(6, 6, max_held=6)
    grant = batch.step(batch.admission(2, [1]), grow={0: 0, 1: 1})
    assert (grant.held, grant.preempted, grant.admitted) == (rows_of(1), [], [])
    assert sizes(batch) == [6, 6]
    grant = batch.step(grow={1: 1}, released=[0])
    assert (grant.held, grant.changed_rows) == ([], rows_of(1))
    assert sizes(batch) == [7]


def test_as_many_rows_sit_out_as_the_paused_buffer_holds() -> None:
    """Each of them goes on where it was; the one that does not fit yields, and its room is the others'."""
    batch = filled(5, 3, 2, 2, max_held=5)
    grant = batch.step(grow={0: 0, 1: 1, 2: 1, 3: 1})
    assert (grant.held, grant.preempted) == (rows_of(1, 2), rows_of(3))
    grant = batch.step(grow={1: 1, 2: 1})
    assert (grant.held, grant.changed_rows) == ([], rows_of(1, 2))
    assert sizes(batch) == [5, 4, 3]


def test_a_row_sits_out_before_a_younger_one_yields() -> None:
    """The younger one may be about to end; what it has computed is lost for nothing then."""
    batch = filled(5, 4, 3, max_held=4)
    grant = batch.step(grow={1: 1, 2: 0})
    assert (grant.held, grant.preempted) == (rows_of(1), [])
    assert sizes(batch) == [5, 4, 3]


def test_nobody_is_admitted_while_a_row_sits_out() -> None:
    """The blocks that it waits for must not go to one who came later."""
    batch = filled(5, 4, max_held=4)
    grant = batch.step(batch.admission(2, [1]), grow={1: 4 * BLOCK_SIZE})
    assert (grant.held, grant.num_free, grant.admitted) == (rows_of(1), 3, [])
    assert batch.step(batch.admission(2, [1])).admitted == [0]


def test_a_short_row_with_more_blocks_than_the_paused_buffer_yields() -> None:
    """The buffer bounds what sits idle; beyond it the blocks go back to the others."""
    batch = filled(5, 7, max_held=6)
    grant = batch.step(grow={1: 1})
    assert (grant.held, grant.preempted) == ([], rows_of(1))


def test_a_row_that_sits_out_yields_when_an_older_one_is_short() -> None:
    """Progress: the paused buffer never keeps from the first row what it needs."""
    batch = filled(6, 6, max_held=12)
    assert batch.step(grow={1: 1}).held == rows_of(1)
    grant = batch.step(grow={0: 1, 1: 1})
    assert (grant.held, grant.preempted, grant.changed_rows) == ([], rows_of(1), rows_of(0))
