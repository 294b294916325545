"""The prefill kernel in Triton's interpreter: tiles of queries over a paged cache."""

import pytest
import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.triton_prefill import prefill_attention, queries_of_tile
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
}


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_attend_by_definition(name: str, block_size: int) -> None:
    """Several tiles a row, tokens cached before, a row left out, and rows that do not fill a tile."""
    shape = SHAPES[name]
    lengths, counts = [150, 0, 3, 90], [140, 1, 3, 5]
    batch = PagedRows(lengths, shape, block_size=block_size)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    total = sum(counts)
    query = torch.randn(total, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    out = torch.full((total, shape.num_heads, shape.value_head_dim), 7.0)
    tiles = query_tiles(
        starts,
        batch.lengths,
        batch.rows,
        num_queries=total,
        queries=queries_of_tile(shape, torch.float32),
    )
    prefill_attention(batch.layer, query, block_tables=batch.tables, tiles=tiles, out=out)
    for row, length in enumerate(lengths):
        part = slice(int(starts[row]), int(starts[row + 1]))
        if length:
            expected = batch.expected(row, query[part].flatten(1, 2))
            torch.testing.assert_close(out[part].double(), expected, rtol=0, atol=1e-5)
        else:
            assert bool((out[part] == 7).all())
