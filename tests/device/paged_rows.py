"""Rows on a scattered paged cache, and their attention by definition, for the tests of the GPU kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache


class PagedRows:
    """One layer's cache with rows of some lengths; every slot that no row owns is NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        shape: LayerShape,
        *,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // block_size) for length in lengths]
        free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.tables = torch.zeros(len(lengths), max([1, *counts]), dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.rows = torch.arange(len(lengths), dtype=torch.int32)
        self.sinks = torch.randn(shape.num_heads, generator=generator) if shape.has_sinks else None
        cache = LayerCache()
        cache.place(
            *(
                torch.full((len(free), block_size, shape.num_kv_heads, dim), torch.nan, dtype=dtype)
                for dim in (shape.head_dim, shape.value_head_dim)
            )
        )
        self.layer = PagedLayer(shape, cache, self.sinks)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            slots = self.slots(row)
            for tensor in (cache.flat_keys, cache.flat_values):
                some = torch.randn(len(slots), *tensor.shape[1:], generator=generator)
                tensor[slots] = some.to(dtype)

    def slots(self, row: int) -> Tensor:
        """Gives where a row's tokens lie."""
        block_size = self.layer.cache.keys.shape[1]
        positions = torch.arange(int(self.lengths[row]))
        return self.tables[row, positions // block_size].long() * block_size + positions % block_size

    def expected(self, row: int, query: Tensor) -> Tensor:
        """Gives `[queries, heads, value_head_dim]` in float64; the last query is the row's last token's."""
        shape, slots = self.layer.shape, self.slots(row)
        group = shape.num_heads // shape.num_kv_heads
        keys = self.layer.cache.flat_keys[slots].double().repeat_interleave(group, dim=1)
        values = self.layer.cache.flat_values[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        count, length = len(query), len(slots)
        distances = torch.arange(length - count, length)[:, None] - torch.arange(length)
        is_hidden = distances < 0
        if shape.window is not None:
            is_hidden |= distances > shape.window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)
