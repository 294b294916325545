"""The decode kernel, on whole rows and on parts of them, in Triton's interpreter."""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportArgumentType=false
# (what a kernel's parameters are is Triton's own matter)

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.triton_decode import block_at, decode_attention, tuning_for
from megallm.core_async.device.triton_work import row_parts
from tests.device.paged_rows import PagedRows

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

SHAPES = {
    "grouped": LayerShape(6, 2, 16, 16, 0.3),
    "odd widths, narrow values": LayerShape(3, 1, 24, 10, 0.3),
    "window and sinks": LayerShape(4, 2, 16, 16, 0.3, window=70, has_sinks=True),
    "softcap": LayerShape(4, 2, 16, 16, 0.3, softcap=0.7),
}


@pytest.mark.parametrize(("block_size", "max_cuts"), [(16, 0), (16, 9), (24, 9), (64, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_all_lengths_attend_by_definition(name: str, block_size: int, max_cuts: int) -> None:
    """Rows shorter than a part, of several parts, and of none; keys read one by one, and by the tile."""
    shape = SHAPES[name]
    batch = PagedRows([1, 150, 0, 64], shape, block_size=block_size)
    query = torch.randn(4, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    out = attended(batch, query, max_cuts=max_cuts)
    for row in (0, 1, 3):
        expected = batch.expected(row, query[row : row + 1].flatten(1, 2))[0]
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)
    assert bool((out[2] == 7).all())


def test_half_precision_is_as_near_as_its_digits() -> None:
    """The products run in the cache's dtype, the sums in float32."""
    batch = PagedRows([100], SHAPES["grouped"], block_size=16, dtype=torch.float16)
    query = torch.randn(1, 2, 3, 16).half()
    out = attended(batch, query, max_cuts=2)
    expected = batch.expected(0, query.flatten(1, 2))
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-3


def test_few_rows_are_cut_and_many_are_not() -> None:
    """One long row must keep the whole card busy; a full batch needs no second kernel."""
    assert tuning_for(256, 8, 4, 128, torch.bfloat16).max_cuts == 0
    assert tuning_for(32, 8, 4, 128, torch.bfloat16).max_cuts == 0
    assert tuning_for(1, 8, 4, 128, torch.bfloat16).max_cuts >= 16
    assert tuning_for(40, 8, 4, 128, torch.bfloat16).max_cuts > 0


def test_wide_heads_take_fewer_keys_at_a_time() -> None:
    """Tiles of keys have to fit the card's shared memory several times over."""
    wide, narrow = (tuning_for(8, 8, 4, width, torch.bfloat16) for width in (256, 128))
    assert wide.tokens * wide.num_stages < narrow.tokens * narrow.num_stages


def attended(batch: PagedRows, query: Tensor, *, max_cuts: int) -> Tensor:
    """Gives what the kernels give; 7 where they give nothing."""
    shape = batch.layer.shape
    out = query.new_full((len(query), shape.num_heads, shape.value_head_dim), 7.0)
    parts = row_parts(batch.lengths, batch.rows, window=shape.window, max_cuts=max_cuts, min_keys=64)
    decode_attention(batch.layer, query, block_tables=batch.tables, parts=parts, out=out)
    return out


@pytest.mark.parametrize("block_size", [1, 16, 32, 48])
@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 48, 64, 65, 127, 128])
def test_no_blocks_are_looked_up_past_a_rows_last(num_keys: int, block_size: int) -> None:
    """Its table may end there: what lies after it is no block, or not the table's memory."""
    last = (num_keys - 1) // block_size
    table = torch.full((last + 200,), -1, dtype=torch.int32)
    table[: last + 1] = torch.arange(last + 1)
    for first in range(0, num_keys, 64):
        blocks = torch.full((64,), -2, dtype=torch.int32)
        _look_up[(1,)](table, blocks, first, num_keys, BLOCK=block_size)
        expected = ((first + torch.arange(64)) // block_size).clamp(max=last).int()
        torch.testing.assert_close(blocks, expected, rtol=0, atol=0)
    # after the last tile there is none, and any block of the row will do
    blocks = torch.full((64,), -2, dtype=torch.int32)
    _look_up[(1,)](table, blocks, num_keys - 1, num_keys, BLOCK=block_size)
    assert bool((blocks >= 0).all())


@triton.jit
def _look_up(table, out, first, end, BLOCK: tl.constexpr) -> None:  # noqa: ANN001, N803
    at = block_at(table, first, end, BLOCK, 64)
    tl.store(out + tl.arange(0, 64), tl.load(at))
