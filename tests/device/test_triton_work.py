"""The lists of parts and tiles that the attention kernels go by, in Triton's interpreter."""

from collections.abc import Sequence

import pytest
import torch

from megallm.core_async.device.triton_work import RowParts, query_tiles, row_parts

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


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


def parts_of(lengths: Sequence[int], *, window: int | None, max_cuts: int) -> RowParts:
    """Gives the parts of rows whose block tables begin at the tenth."""
    rows = torch.arange(len(lengths), dtype=torch.int32) + 10
    lengths_column = torch.tensor(lengths, dtype=torch.int32)
    return row_parts(lengths_column, rows, window=window, max_cuts=max_cuts, min_keys=64)
