"""Rows on a paged cache for the tests of the CPU kernels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megallm.core_async.device.cpu_kernels import CpuKernels


class PagedBatch:
    """Rows on a paged cache whose every other slot is NaN, and queries for them."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 16,
        value_dim: int = 16,
        block_size: int = 4,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(len(rows) + rows[0][1])
        blocks = [math.ceil(context / block_size) for _, context in rows]
        shape = (sum(blocks) + 1, block_size, kv_heads)
        self.keys = torch.full((*shape, head_dim), math.nan)
        self.values = torch.full((*shape, value_dim), math.nan)
        # entries past a row's end mean nothing: these would be read far outside the cache
        self.block_tables = torch.full((len(rows), max(blocks) + 1), 2**30, dtype=torch.int32)
        free = torch.randperm(shape[0], generator=generator).tolist()
        for row, ((queries, context), count) in enumerate(zip(rows, blocks, strict=True)):
            self.block_tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            first_seen = 0 if window is None else max(0, context - queries - window)
            for position in range(first_seen, context):
                block = int(self.block_tables[row, position // block_size])
                for cache in (self.keys, self.values):
                    cache[block, position % block_size] = torch.randn(cache.shape[2:], generator=generator)
        lengths = torch.tensor([0, *(queries for queries, _ in rows)])
        self.query_starts = lengths.cumsum(0).int()
        self.context_lengths = torch.tensor([context for _, context in rows]).int()
        self.queries = torch.randn(int(lengths.sum()), heads, head_dim, generator=generator)
        self.window = window

    def attend(self, kernels: CpuKernels) -> Tensor:
        """Gives the attention of all rows."""
        out = torch.full((*self.queries.shape[:2], self.values.shape[3]), math.nan)
        kernels.paged_attention(
            self.queries,
            self.keys,
            self.values,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            0.3,
            out,
            self.window,
        )
        return out

    def attend_part(self, kernels: CpuKernels, row: int, first: int, last: int) -> Tensor:
        """Gives the attention of queries [first, last) of a row, in a call of their own."""
        start, end = self.query_starts[row : row + 2].tolist()
        out = torch.full((last - first, *self.queries.shape[1:2], self.values.shape[3]), math.nan)
        kernels.paged_attention(
            self.queries[start + first : start + last],
            self.keys,
            self.values,
            self.block_tables[row : row + 1],
            torch.tensor([0, last - first], dtype=torch.int32),
            self.context_lengths[row : row + 1] - (end - start - last),
            0.3,
            out,
            self.window,
        )
        return out
