"""The decode kernel, whole and in parts, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.triton_decode import MAX_PARTS, decode_attention, num_parts_for
from tests.device.paged_rows import PagedRows

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

SHAPES = {
    "grouped": LayerShape(6, 2, 16, 16, 0.3),
    "odd widths, narrow values": LayerShape(3, 1, 24, 10, 0.3),
    "window and sinks": LayerShape(4, 2, 16, 16, 0.3, window=70, has_sinks=True),
}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_all_lengths_attend_by_definition(name: str, num_parts: int) -> None:
    """Rows shorter than a part, of several parts, and of none: the last's place stays as it was."""
    shape = SHAPES[name]
    batch = PagedRows([1, 150, 0], shape, block_size=16)
    group = shape.num_heads // shape.num_kv_heads
    query = torch.randn(3, shape.num_kv_heads, group, shape.head_dim)
    out = torch.full((3, shape.num_heads, shape.value_head_dim), 7.0)
    decode_attention(
        batch.layer,
        query,
        block_tables=batch.tables,
        table_rows=batch.rows,
        kv_lengths=batch.lengths,
        num_parts=num_parts,
        out=out,
    )
    for row in (0, 1):
        expected = batch.expected(row, query[row : row + 1].flatten(1, 2))[0]
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)
    assert bool((out[2] == 7).all())


def test_half_precision_is_as_near_as_its_digits() -> None:
    """The products run in the cache's dtype, the sums in float32."""
    batch = PagedRows([100], SHAPES["grouped"], block_size=16, dtype=torch.float16)
    query = torch.randn(1, 2, 3, 16).half()
    out = torch.empty(1, 6, 16, dtype=torch.float16)
    decode_attention(
        batch.layer,
        query,
        block_tables=batch.tables,
        table_rows=batch.rows,
        kv_lengths=batch.lengths,
        num_parts=2,
        out=out,
    )
    expected = batch.expected(0, query.flatten(1, 2))
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-3


def test_few_rows_are_split_and_many_are_not() -> None:
    """One long row must keep the whole card busy; a full batch needs no second kernel."""
    assert num_parts_for(256, 8) == 1
    assert num_parts_for(32, 8) == 1
    assert 16 < num_parts_for(1, 8) <= MAX_PARTS
    assert num_parts_for(1, 1) == MAX_PARTS
