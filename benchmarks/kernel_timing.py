"""Times one launch of the attention kernels on scattered blocks. Needs a CUDA device."""
# pyright: reportUnknownMemberType=false

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_decode import decode_attention, tuning_for
from megallm.core_async.device.triton_prefill import prefill_attention, queries_of_tile
from megallm.core_async.device.triton_work import query_tiles, row_parts

LAUNCHES = 5
REPLAYS = 4
TURNS = 5


class ScatteredRows(Struct, frozen=True, eq=False):
    """Rows of some lengths in a cache of random numbers, their blocks anywhere."""

    layer: PagedLayer
    tables: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def draw(cls, lengths: Sequence[int], shape: LayerShape, block_size: int) -> "ScatteredRows":
        """Gives rows of such lengths."""
        counts = [-(-length // block_size) for length in lengths]
        free = torch.randperm(sum(counts), device="cuda").int()
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
        first = 0
        for row, count in enumerate(counts):
            tables[row, :count] = free[first : first + count]
            first += count
        cache = LayerCache()
        size = (sum(counts), block_size, shape.num_kv_heads, shape.head_dim)
        cache.place(*(torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
        return cls(
            layer=PagedLayer(shape, cache),
            tables=tables,
            rows=torch.arange(len(lengths), dtype=torch.int32, device="cuda"),
            lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        )

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        """Gives random queries as the kernels take them, and room for what they give."""
        shape = self.layer.shape
        group = shape.num_heads // shape.num_kv_heads
        query = torch.randn(count, shape.num_kv_heads, group, shape.head_dim, device="cuda").bfloat16()
        return query, query.new_empty(count, shape.num_heads, shape.head_dim)


def decode_us(lengths: Sequence[int], shape: LayerShape, *, block_size: int) -> float:
    """Gives the microseconds of decode attention for rows of such lengths, one query each."""
    some = ScatteredRows.draw(lengths, shape, block_size)
    query, out = some.queries(len(lengths))
    tuning = tuning_for(len(lengths), shape.num_kv_heads, query.shape[2], shape.head_dim, query.dtype)
    parts = row_parts(
        some.lengths, some.rows, window=None, max_cuts=tuning.max_cuts, min_keys=tuning.min_keys
    )
    torch.cuda.synchronize()  # the kernel reads the list before the kernel ahead of it has ended
    return replayed_us(
        lambda: decode_attention(some.layer, query, block_tables=some.tables, parts=parts, out=out)
    )


def prefill_us(lengths: Sequence[int], shape: LayerShape, *, block_size: int) -> float:
    """Gives the microseconds of attention for whole prompts of such lengths."""
    some = ScatteredRows.draw(lengths, shape, block_size)
    query, out = some.queries(sum(lengths))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    tiles = query_tiles(
        starts,
        some.lengths,
        some.rows,
        num_queries=sum(lengths),
        queries=queries_of_tile(shape, query.dtype),
    )
    torch.cuda.synchronize()  # likewise
    return replayed_us(
        lambda: prefill_attention(some.layer, query, block_tables=some.tables, tiles=tiles, out=out)
    )


def replayed_us(launch: Callable[[], None]) -> float:
    """Gives the median microseconds of a launch within a captured graph of several."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(TURNS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / (LAUNCHES * REPLAYS))
    return statistics.median(times)
