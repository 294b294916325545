"""The lists of parts and tiles that the attention kernels go by, in Triton's interpreter."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from megallm.core_async.device.triton_work import KEYS, SOME_ROWS, RowParts, query_tiles, row_parts

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

LENGTHS = st.integers(0, 300) | st.sampled_from([0, 64, 65, 700, 5000])
"""Of rows: some have none, some equal ones, few are much longer than others."""


@pytest.mark.parametrize("max_cuts", [0, 1, 5, 40])
@pytest.mark.parametrize("window", [None, 100])
def test_parts_cover_every_key_once(max_cuts: int, window: int | None) -> None:
    """Rows of no, of few and of many keys: what a window hides is left out but for one multiple of keys."""
    lengths = [0, 1, 700, 64, 0, 65, 700, 33]
    parts = parts_of(lengths, window=window, max_cuts=max_cuts)
    keys: list[list[int]] = [[] for _ in lengths]
    for table_row, row, begin, end, *_ in parts.parts[: int(parts.num_parts)].tolist():
        assert table_row == row + 10
        assert begin % 64 == 0
        keys[row] += range(begin, end)
    for length, found in zip(lengths, keys, strict=True):
        first = 0 if window is None else max(length - 1 - window, 0) // 64 * 64
        assert sorted(found) == list(range(first, length))
    assert int(parts.num_parts) <= len(lengths) + max_cuts


def test_whole_parts_come_first_and_the_others_by_size() -> None:
    """The shortest fill the gaps when programs run out of work."""
    parts = parts_of([10, 300, 50, 200, 50], window=None, max_cuts=4)
    spans = [end - begin for _, _, begin, end, *_ in parts.parts[: int(parts.num_parts)].tolist()]
    assert spans == [192, 192, 108, 50, 50, 10, 8]


# (in the interpreter a row takes tens of milliseconds: a failure is shown as it was found)
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@example(lengths=[1, 5000, 1], window=None, max_cuts=40, min_keys=64, some_rows=4)
@example(lengths=[5000, 1, 1, 1, 1], window=None, max_cuts=1, min_keys=64, some_rows=4)
@given(
    lengths=st.integers(1, 20).flatmap(lambda count: st.lists(LENGTHS, min_size=count, max_size=count)),
    window=st.none() | st.integers(0, 400),
    max_cuts=st.just(0) | st.integers(1, 40),
    min_keys=st.sampled_from([64, 128, 256]),
    some_rows=st.sampled_from([4, SOME_ROWS]),
)
def test_list_is_that_of_plain_python(
    lengths: list[int], window: int | None, max_cuts: int, min_keys: int, some_rows: int
) -> None:
    """Each row's parts are placed by a program of its own: together they make one list without gaps."""
    seen = [0 if window is None else max(length - 1 - window, 0) for length in lengths]
    firsts = [first // KEYS * KEYS for first in seen]
    spans = [length - first for length, first in zip(lengths, firsts, strict=True)]
    size = -(-sum(spans) // max_cuts // KEYS) * KEYS if max_cuts else max(spans)
    size = max(size, min_keys)
    counts = [-(-span // size) for span in spans]
    rows = range(len(lengths))
    whole = [(row, part) for row in rows for part in range(spans[row] // size)]
    rests = sorted((row for row in rows if spans[row] % size), key=lambda row: -(spans[row] % size))
    listed = [*whole, *((row, spans[row] // size) for row in rests)]

    found = parts_of(lengths, window=window, max_cuts=max_cuts, min_keys=min_keys, some_rows=some_rows)
    assert int(found.num_parts) == len(listed)
    begins = [firsts[row] + part * size for row, part in listed]
    assert found.parts[: len(listed), :7].tolist() == [
        [row + 10, row, begin, min(begin + size, lengths[row]), counts[row], seen[row], lengths[row]]
        for (row, _), begin in zip(listed, begins, strict=True)
    ]
    places = {part: place for place, part in enumerate(listed)}
    assert [found.rows[row, :3].tolist() for row in rows if counts[row]] == [
        [counts[row], places[row, 0], places[row, counts[row] - 1]] for row in rows if counts[row]
    ]
    assert found.rows[:, 0].tolist() == counts


def test_a_row_knows_where_its_parts_are() -> None:
    """The join reads the whole ones in a row, and the last by its own place."""
    lengths = [10, 300, 50, 0]
    parts = parts_of(lengths, window=None, max_cuts=4)
    listed = parts.parts[: int(parts.num_parts)].tolist()
    for row, length in enumerate(lengths):
        count, first, last, _ = parts.rows[row].tolist()
        places = [*range(first, first + count - 1), last] if count else []
        assert [listed[place][1] for place in places] == [row] * count
        assert sum(listed[place][3] - listed[place][2] for place in places) == length


def test_tiles_cover_every_query_once() -> None:
    """Chunks that no tile divides, a row that is left out, and tiles that nobody needs."""
    starts = torch.tensor([3, 8, 9, 29], dtype=torch.int32)
    lengths, rows = torch.tensor([5, 0, 70]).int(), torch.tensor([4, 5, 6]).int()
    tiles = query_tiles(starts, lengths, rows, num_queries=26, queries=8)
    found = [tile[:5] for tile in tiles.tiles.tolist() if tile[2]]
    assert found == [[4, 3, 5, 0, 5], [6, 9, 8, 50, 70], [6, 17, 8, 58, 70], [6, 25, 4, 66, 70]]


def parts_of(
    lengths: Sequence[int],
    *,
    window: int | None,
    max_cuts: int,
    min_keys: int = 64,
    some_rows: int = SOME_ROWS,
) -> RowParts:
    """Gives the parts of rows whose block tables begin at the tenth."""
    rows = torch.arange(len(lengths), dtype=torch.int32) + 10
    lengths_column = torch.tensor(lengths, dtype=torch.int32)
    return row_parts(
        lengths_column, rows, window=window, max_cuts=max_cuts, min_keys=min_keys, some_rows=some_rows
    )
