"""Times one launch of decode attention on scattered blocks. Needs a CUDA device."""
# pyright: reportUnknownMemberType=false (torch is untyped in part)

import statistics
from collections.abc import Callable, Sequence

import torch

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_decode import decode_attention, num_parts_for

LAUNCHES = 5
REPLAYS = 4
TURNS = 5


def decode_us(lengths: Sequence[int], *, block_size: int, heads: int, kv_heads: int, head_dim: int) -> float:
    """Gives the microseconds of one launch for rows of such lengths."""
    counts = [-(-length // block_size) for length in lengths]
    free = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = free[first : first + count]
        first += count
    cache = LayerCache()
    shape = (sum(counts), block_size, kv_heads, head_dim)
    cache.place(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    layer = PagedLayer(LayerShape(heads, kv_heads, head_dim, head_dim, head_dim**-0.5), cache)
    query = torch.randn(len(lengths), kv_heads, heads // kv_heads, head_dim, device="cuda").bfloat16()
    out = torch.empty(len(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def attend() -> None:
        decode_attention(
            layer,
            query,
            block_tables=tables,
            table_rows=rows,
            kv_lengths=kv_lengths,
            num_parts=num_parts_for(len(lengths), kv_heads),
            out=out,
        )

    return replayed_us(attend)


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
