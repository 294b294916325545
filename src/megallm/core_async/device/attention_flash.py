"""Attention by the installed flash-attn: rotary positions and the cache write by our kernel, then its own.

Knows how a step's batch is laid out for the package. Import it only where it runs, as the kernels.
"""

import torch
from torch import Tensor

from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.attention_inputs import turned
from megallm.core_async.device.flash_libraries import FlashLibrary, FlashRows


class FlashAttention:
    """One call for all rows of a step; a decode row is a row of one query."""

    name = "flash"
    norms_heads = True

    def __init__(self, library: FlashLibrary, block_size: int, dtype: torch.dtype) -> None:
        self._library = library
        self._block_size = block_size
        self._dtype = dtype
        self._batch: AttentionBatch | None = None
        self._rows: FlashRows | None = None

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; see `Attention.refusal`."""
        if self._dtype not in (torch.bfloat16, torch.float16):
            return f"the model is in {str(self._dtype).removeprefix('torch.')}, flash-attn in 16 bits alone"
        return self._library.refusal(shape, block_size=self._block_size)

    def begin_step(self, batch: AttentionBatch) -> None:
        """Lays out the rows' lengths and block tables, once for all layers."""
        self._batch = batch
        kv_lengths = batch.kv_lengths
        if batch.chunk_lengths is not None:
            kv_lengths = kv_lengths + batch.chunk_lengths
        block_tables = batch.block_tables
        if batch.table_rows is not None:
            block_tables = block_tables.index_select(0, batch.table_rows)
        kv_starts = torch.zeros(len(kv_lengths) + 1, dtype=torch.int32, device=kv_lengths.device)
        torch.cumsum(kv_lengths, 0, dtype=torch.int32, out=kv_starts[1:])
        is_decode_alone = batch.chunk_lengths is None and batch.num_decode == batch.num_tokens
        self._rows = FlashRows(
            query_starts=batch.query_starts,
            kv_lengths=kv_lengths,
            kv_starts=kv_starts,
            block_tables=block_tables,
            max_query_length=1 if is_decode_alone else batch.max_query_length,
            max_kv_length=batch.max_kv_length,
        )

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch, rows = self._batch, self._rows
        assert batch is not None, "attend before begin_step"
        assert rows is not None, "attend before begin_step"
        query = turned(layer, batch, query, key, value)
        attended = self._library.attend(layer, query.flatten(1, 2), rows)
        return attended.reshape(batch.num_tokens, -1)
