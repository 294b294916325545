"""What a rank keeps per row, changed by differences."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from megallm.core_async.device.rows import Rows, column_of, ramps
from megallm.core_async.messages import Row, RowSetup, Sampling, StepPlan, pack_ints


def plan_of(
    new_rows: list[RowSetup] | None = None, changes: list[tuple[int, int, list[int]]] | None = None
) -> StepPlan:
    """Gives a plan that brings only differences: new rows, and (row, first entry, blocks)."""
    changes = changes or []
    return structs.replace(
        StepPlan.empty(),
        new_rows=new_rows or [],
        changed_rows=pack_ints([row for row, _, _ in changes]),
        changed_starts=pack_ints([start for _, start, _ in changes]),
        changed_counts=pack_ints([len(blocks) for _, _, blocks in changes]),
        blocks=pack_ints([block for _, _, blocks in changes for block in blocks]),
    )


def rows() -> Rows:
    """Gives four rows of up to five blocks."""
    return Rows(max_requests=4, max_sequence_length=10, block_size=2, device=torch.device("cpu"))


def test_table_is_wide_enough_for_the_longest_sequence() -> None:
    """Ten tokens in blocks of three are four blocks."""
    wide = Rows(max_requests=2, max_sequence_length=10, block_size=3, device=torch.device("cpu"))
    assert wide.block_tables.shape == (2, 4)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5)), max_size=4), max_size=5
    )
)
def test_differences_add_up_to_the_tables_they_were_taken_from(
    steps: list[list[tuple[int, int, int]]],
) -> None:
    """A rank never sees a whole table, so a lost entry would stay wrong."""
    kept, expected, block = rows(), np.zeros((4, 5), dtype=np.int32), 0
    for step in steps:
        changes: list[tuple[int, int, list[int]]] = []
        for row, start, count in step:
            blocks = [block := block + 1 for _ in range(min(count, 5 - start))]
            if row not in [changed for changed, _, _ in changes]:
                changes.append((row, start, blocks))
                expected[row, start : start + len(blocks)] = blocks
        kept.apply(plan_of(changes=changes))
        assert kept.block_tables.tolist() == expected.tolist()


def test_new_row_brings_all_its_sampling_numbers() -> None:
    """A number left from the row's last request would change the new one's text."""
    kept = rows()
    first = Sampling(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**63 - 1, wants_log_probs=True)
    kept.apply(plan_of([RowSetup(Row(2), first), RowSetup(Row(0), Sampling())]))
    taken = kept.sampling_of(np.array([2, 0], dtype=np.int32))
    assert [taken.temperature[0], taken.top_k[0], taken.top_p[0], taken.min_p[0]] == [0.5, 3, 0.25, 0.125]
    assert (taken.seed[0], taken.wants_log_probs.tolist()) == (2**63 - 1, [True, False])
    kept.apply(plan_of([RowSetup(Row(2), Sampling(temperature=0.0))]))
    again = kept.sampling_of(np.array([2], dtype=np.int32))
    assert [again.temperature[0], again.top_k[0], again.top_p[0], again.min_p[0]] == [0, 0, 0, 0]
    assert taken.top_k[0] == 3, "what was taken is a copy"


def test_ramps_count_up_for_each_count() -> None:
    """Positions and table entries are built from them."""
    assert ramps(np.array([3, 1, 0, 2], dtype=np.int32)).tolist() == [0, 1, 2, 0, 0, 1]
    assert ramps(np.array([], dtype=np.int32)).tolist() == []
    assert ramps(np.array([2], dtype=np.int32)).dtype == np.int32


def test_column_is_the_message_itself() -> None:
    """A step at 256 rows must not copy its columns number by number."""
    column = column_of(pack_ints([1, -2, 3]))
    assert column.tolist() == [1, -2, 3]
    assert not column.flags.owndata
