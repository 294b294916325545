"""A token's attention in a prompt, in a chunk and as a decode row: the same bits, on a GPU."""

import pytest
import torch
from torch import Tensor

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_invariant_attention import PROGRAMS, invariant_attention, num_shares_for

SHAPES = {
    "grouped heads": LayerShape(32, 8, 128, 128, 0.088),
    "one kv head per head": LayerShape(16, 16, 80, 80, 0.1),
    "narrow values": LayerShape(8, 8, 192, 128, 0.1),
    "wide": LayerShape(8, 2, 256, 256, 0.06),
    "window": LayerShape(32, 8, 128, 128, 0.088, window=300),
    "softcap": LayerShape(16, 8, 64, 64, 0.125, softcap=20.0),
    "sinks": LayerShape(12, 4, 96, 96, 0.1, has_sinks=True),
}
LENGTH = 1500


def test_few_rows_are_shared_out_and_many_are_not() -> None:
    """A long row alone must fill the card; the programs of many rows do."""
    assert num_shares_for(1, 8) == PROGRAMS // 8
    assert num_shares_for(64, 8) == 1


class OneRow:
    """A row on a scattered cache."""

    def __init__(self, shape: LayerShape, block_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        blocks = -(-LENGTH // block_size)
        cache = LayerCache()
        kept = (2 * blocks, block_size, shape.num_kv_heads)
        cache.place(
            torch.randn(*kept, shape.head_dim, device="cuda", dtype=dtype),
            torch.randn(*kept, shape.value_head_dim, device="cuda", dtype=dtype),
        )
        sinks = torch.randn(shape.num_heads, device="cuda", dtype=dtype) if shape.has_sinks else None
        self.layer = PagedLayer(shape, cache, sinks)
        self.table = torch.randperm(2 * blocks, device="cuda").int()[None, :blocks]
        group = shape.num_heads // shape.num_kv_heads
        self.queries = torch.randn(
            LENGTH, shape.num_kv_heads, group, shape.head_dim, device="cuda", dtype=dtype
        )

    def attend(self, parts: list[tuple[int, int]], *, num_shares: int | None = None) -> Tensor:
        """Gives the attention of several pieces of the row, each as a row of its own."""
        lengths = torch.tensor([last for _, last in parts], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *(last - first for first, last in parts)], device="cuda").cumsum(0).int()
        query = torch.cat([self.queries[first:last] for first, last in parts])
        shape = self.layer.shape
        out = torch.full(
            (len(query), shape.num_heads, shape.value_head_dim), torch.nan, device="cuda", dtype=query.dtype
        )
        invariant_attention(
            self.layer,
            query,
            block_tables=self.table,
            table_rows=torch.zeros_like(lengths),
            query_starts=starts,
            kv_lengths=lengths,
            out=out,
            has_chunks=any(last - first > 1 for first, last in parts),
            num_shares=num_shares,
        )
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_token_has_the_same_bits_wherever_it_is_computed(
    name: str, block_size: int, dtype: torch.dtype
) -> None:
    """What was sampled must score as it was sampled: parts shared out, or all in one program."""
    row = OneRow(SHAPES[name], block_size, dtype)
    whole = row.attend([(0, LENGTH)])
    assert bool(whole.isfinite().all())
    assert row.attend([(700, LENGTH)]).equal(whole[700:])
    positions = [0, 63, 255, 256, 300, 767, 1023, LENGTH - 1]
    ones = [(position, position + 1) for position in positions]
    for num_shares in (1, 6, None):
        assert row.attend(ones, num_shares=num_shares).equal(whole[positions])
    mixed = row.attend([(900, 901), (0, 40), (500, 777)])
    assert mixed.equal(torch.cat((whole[900:901], whole[:40], whole[500:777])))
