"""A block grant while it is being made."""

from megallm.core_async.messages import BlockGrant, BlockId, Row
from megallm.core_async.plan.draft import Draft


def test_an_untouched_draft_grants_nothing() -> None:
    """Most steps of a batch that decodes change nobody's table."""
    grant = Draft().grant(num_free=3, num_cached_blocks=2)
    assert grant == BlockGrant([], [], [], [], [], [], [], [], [], num_free=3, num_cached_blocks=2)


def test_changes_become_columns_in_the_order_they_were_made() -> None:
    """The ranks apply them one after the other; a row that is changed twice is listed twice."""
    draft = Draft()
    draft.change(Row(4), 0, [BlockId(7), BlockId(8)])
    draft.change(Row(1), 5, [BlockId(2)])
    draft.change(Row(4), 2, [BlockId(9)])
    grant = draft.grant(num_free=0, num_cached_blocks=0)
    assert grant.changed_rows == [4, 1, 4]
    assert grant.changed_starts == [0, 5, 2]
    assert grant.changed_counts == [2, 1, 1]
    assert grant.blocks == [7, 8, 2, 9]


def test_a_draft_keeps_what_it_was_given_apart_from_the_giver() -> None:
    """A table that grows after the grant must not change what the ranks are told."""
    draft, blocks = Draft(), [BlockId(7)]
    draft.change(Row(0), 0, blocks)
    blocks.append(BlockId(8))
    assert draft.grant(num_free=0, num_cached_blocks=0).blocks == [7]


def test_admissions_and_those_who_lost_their_blocks_are_passed_on() -> None:
    """Their columns are filled by whoever decides."""
    draft = Draft()
    draft.admitted.append(2)
    draft.num_cached.append(16)
    draft.num_chunk.append(5)
    draft.preempted.append(Row(3))
    draft.held.append(Row(2))
    grant = draft.grant(num_free=0, num_cached_blocks=1)
    assert (grant.admitted, grant.num_cached, grant.num_chunk) == ([2], [16], [5])
    assert (grant.preempted, grant.held) == ([3], [2])
