"""What a cache reports: all of it comes, in order, bounded, and it is what the cache has."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import PrefixReport
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.prefix_changes import PrefixChanges
from tests.plan.batches import Batch

BLOCK_SIZE, NUM_BLOCKS = 2, 7


def test_a_report_has_the_last_change_of_each_key_and_is_given_once() -> None:
    """A key that came, went and came again is one key that came."""
    changes = PrefixChanges()
    changes.know([b"a", b"b"])
    changes.forget([b"b", b"a"])
    changes.know([b"a"])
    assert changes.take() == PrefixReport([b"a"], [b"b"])
    assert changes.take() == PrefixReport([], [])


def test_a_flush_is_reported_before_what_came_after_it() -> None:
    """And in place of all that came before: the cache was emptied."""
    changes = PrefixChanges()
    changes.know([b"a"])
    changes.flush()
    assert len(changes) == 1
    changes.know([b"b"])
    assert changes.take() == PrefixReport([b"b"], [], is_flushed=True)
    assert changes.take() == PrefixReport([], [])


def test_reports_are_bounded_and_the_oldest_changes_come_first() -> None:
    """A step that fills thousands of blocks must not make a message that holds up the others."""
    changes = PrefixChanges(max_report=2, max_waiting=4)
    changes.know([b"a", b"b", b"c"])
    assert changes.take() == PrefixReport([b"a", b"b"], [])
    changes.forget([b"c"])
    changes.know([b"d"])
    assert changes.take() == PrefixReport([b"d"], [b"c"])


def test_what_nobody_takes_is_lost_from_its_oldest_on() -> None:
    """A cache that nobody asks must not grow a list for ever."""
    changes = PrefixChanges(max_report=2, max_waiting=4)
    changes.know([b"a", b"b", b"c", b"d"])
    assert len(changes) == 4
    changes.know([b"e"])
    assert changes.take() == PrefixReport([b"d", b"e"], [])
    assert not len(changes)


def test_bounds_that_make_no_sense_are_refused() -> None:
    """A report of nothing would never end."""
    with pytest.raises(AssertionError, match="reports of 0 keys, 3 wait"):
        PrefixChanges(max_report=0, max_waiting=3)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=25),
    keeps_cached=st.booleans(),
    flushed_at=st.integers(0, 40),
)
def test_what_was_reported_is_what_the_cache_finds(
    prompts: list[list[int]], *, keeps_cached: bool, flushed_at: int
) -> None:
    """Through evictions, copies and flushes, and after each report it is whole prefixes."""
    changes = PrefixChanges(max_report=2)
    batch = Batch(BlockPool(NUM_BLOCKS, BLOCK_SIZE, keeps_cached=keeps_cached, changes=changes), BLOCK_SIZE)
    known: set[bytes] = set()
    above: dict[bytes, bytes] = {}
    for number, prompt in enumerate(prompts):
        if number == flushed_at:
            batch.forget()
        batch.step(released=[number - 2] if number > 1 else [])
        take_reports(changes, known, above)
        admission = batch.admission(number, prompt)
        above.update(pairwise(reversed(admission.keys)))
        grant = batch.step(admission)
        if grant.admitted:
            num_known = next((place for place, key in enumerate(admission.keys) if key not in known), 99)
            most = min(len(admission.keys), (len(prompt) - 1) // BLOCK_SIZE)
            assert grant.num_cached == [BLOCK_SIZE * min(num_known, most)]


def take_reports(changes: PrefixChanges, known: set[bytes], above: dict[bytes, bytes]) -> None:
    """Applies all that is left to report; `above`: by key, that of the block before it."""
    is_first = True
    while is_first or len(changes):
        is_first = False
        report = changes.take()
        assert len(report.known) + len(report.forgotten) <= 2
        if report.is_flushed:
            known.clear()
        known.difference_update(report.forgotten)
        known.update(report.known)
        assert all(above[key] in known for key in known if key in above)
