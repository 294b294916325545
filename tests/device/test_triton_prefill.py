"""The prefill kernel in Triton's interpreter: tiles of queries over a paged cache."""

from itertools import accumulate

import pytest
import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.triton_prefill import PrefillTuning, prefill_attention, queries_of_tile
from megallm.core_async.device.triton_work import query_tiles
from tests.device.paged_rows import PagedRows

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

SHAPES = {
    "grouped": LayerShape(6, 2, 16, 16, 0.3),
    "window and sinks": LayerShape(2, 2, 16, 8, 0.3, window=20, has_sinks=True),
    "softcap": LayerShape(4, 2, 16, 16, 0.3, softcap=0.7),
    "four kv heads, sinks": LayerShape(8, 4, 16, 16, 0.3, has_sinks=True),
}
TUNINGS = {
    "default": PrefillTuning(lines=64, tokens=64, few_tokens=32, num_warps=4, num_stages=3),
    "many keys at a time": PrefillTuning(lines=64, tokens=64, few_tokens=64, num_warps=4, num_stages=3),
    "few keys at a time": PrefillTuning(lines=64, tokens=32, few_tokens=32, num_warps=4, num_stages=3),
    "few queries at a time": PrefillTuning(lines=32, tokens=16, few_tokens=16, num_warps=4, num_stages=3),
}


def check(
    shape: LayerShape, lengths: list[int], counts: list[int], block_size: int, tuning: PrefillTuning
) -> None:
    """Attends for the last queries of rows of such lengths, and compares with the definition."""
    batch = PagedRows(lengths, shape, block_size=block_size)
    starts = [0, *accumulate(counts)]
    total = sum(counts)
    query = torch.randn(total, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    out = torch.full((total, shape.num_heads, shape.value_head_dim), 7.0)
    tiles = query_tiles(
        torch.tensor(starts, dtype=torch.int32),
        batch.lengths,
        batch.rows,
        num_queries=total,
        queries=queries_of_tile(shape, torch.float32, tuning),
    )
    prefill_attention(batch.layer, query, block_tables=batch.tables, tiles=tiles, out=out, tuning=tuning)
    for row, length in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        if length:
            expected = batch.expected(row, query[part].flatten(1, 2))
            torch.testing.assert_close(out[part].double(), expected, rtol=0, atol=1e-5)
        else:
            assert bool((out[part] == 7).all())


@pytest.mark.parametrize(
    ("tuning", "block_size"),
    [
        ("default", 16),
        ("default", 64),
        ("few keys at a time", 32),
        ("few queries at a time", 16),
        ("many keys at a time", 64),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_attend_by_definition(name: str, block_size: int, tuning: str) -> None:
    """Several tiles a row, tokens cached before, a row left out, and rows that do not fill a tile."""
    check(SHAPES[name], [150, 0, 3, 90], [140, 1, 3, 5], block_size, TUNINGS[tuning])


@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_query_that_sees_nothing_of_its_first_keys_is_untouched_by_them(tuning: str) -> None:
    """A window that begins within a tile of keys hides all of an earlier one from the tile's last queries."""
    shape = LayerShape(2, 1, 16, 16, 0.3, window=2)
    check(shape, [131, 64], [131, 40], 64, TUNINGS[tuning])


@pytest.mark.parametrize("tuning", ["default", "many keys at a time"])
@pytest.mark.parametrize("block_size", [4, 16, 32, 48, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_tiles_of_many_keys_are_read_from_blocks_of_any_size(
    window: int | None, block_size: int, tuning: str
) -> None:
    """Blocks that fill a tile, that it fills, and neither; rows with many keys beside one with few.

    They end within a block, at its end and just past it.
    """
    shape = LayerShape(4, 1, 16, 16, 0.3, window=window)
    check(shape, [601, 70, 576, 545], [21, 70, 2, 18], block_size, TUNINGS[tuning])
