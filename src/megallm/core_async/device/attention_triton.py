"""Attention by the Triton kernels.

Knows how a step's batch is laid out for the kernels. Import it only where it runs, as the kernels.
"""

import torch
from torch import Tensor

from megallm.core_async.device import triton_layer
from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.triton_decode import decode_attention, num_parts_for
from megallm.core_async.device.triton_prefill import prefill_attention

MAX_HEAD_DIM = 256
MIXED_PARTS = 4
"""Parts of decode rows' keys where it is not known how many rows there are."""


class TritonAttention:
    """Attention by the paged kernels: one for the step's decode rows, one for its chunks.

    Both write into one tensor. Rotary positions and the cache write are a kernel before them.
    """

    name = "triton"

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._table_rows: Tensor | None = None

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; see `Attention.refusal`."""
        widest = max(shape.head_dim, shape.value_head_dim)
        return None if widest <= MAX_HEAD_DIM else f"a head has {widest} dimensions, at most {MAX_HEAD_DIM}"

    def begin_step(self, batch: AttentionBatch) -> None:
        """Takes the step's batch; the kernels read it as it is."""
        self._batch = batch
        table_rows = batch.table_rows
        if table_rows is None:
            table_rows = torch.arange(len(batch.kv_lengths), dtype=torch.int32, device=batch.slots.device)
        self._table_rows = table_rows

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch, shape, table_rows = self._batch, layer.shape, self._table_rows
        assert batch is not None, "attend before begin_step"
        assert table_rows is not None, "attend before begin_step"
        if query.dim() == 3:  # noqa: PLR2004 - heads not yet by kv head
            query = query.unflatten(1, (shape.num_kv_heads, -1))
        query, key, value = (
            part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value)
        )
        triton_layer.turn_and_write(
            query,
            key,
            value,
            batch.cosines if shape.uses_rope else None,
            batch.sines if shape.uses_rope else None,
            batch.slots,
            layer.cache,
            is_interleaved=batch.is_rope_interleaved,
        )
        out = torch.empty(
            (batch.num_tokens, shape.num_heads, shape.value_head_dim), dtype=query.dtype, device=query.device
        )
        decoded = batch.num_decode
        if decoded:
            decode_attention(
                layer,
                query[:decoded],
                block_tables=batch.block_tables,
                table_rows=table_rows,
                kv_lengths=batch.kv_lengths,
                num_parts=MIXED_PARTS
                if batch.chunk_lengths is not None
                else num_parts_for(decoded, shape.num_kv_heads),
                out=out,
            )
        first = 0 if batch.chunk_lengths is not None else decoded
        chunk_lengths = batch.kv_lengths[first:] if batch.chunk_lengths is None else batch.chunk_lengths
        if len(chunk_lengths):
            prefill_attention(
                layer,
                query,
                block_tables=batch.block_tables,
                table_rows=table_rows[first:],
                query_starts=batch.query_starts[first:],
                kv_lengths=chunk_lengths,
                num_queries=batch.num_tokens - first,
                out=out,
            )
        return out.view(batch.num_tokens, -1)
