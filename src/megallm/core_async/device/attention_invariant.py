"""Attention whose rows are the same to the bit whatever rows are beside them, by the Triton kernels.

Knows how a step's batch is laid out for the kernels. Import it only where it runs, as the kernels.
"""

import torch
from torch import Tensor

from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.attention_inputs import turned
from megallm.core_async.device.triton_invariant_attention import invariant_attention

MAX_HEAD_DIM = 256


class InvariantAttention:
    """One kernel for all rows of a step: a decode row is a row of one query."""

    name = "triton"
    norms_heads = False
    """A norm's sum is in an order that changes with how many tokens a program turns."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._table_rows: Tensor | None = None
        self._kv_lengths: Tensor | None = None

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; see `Attention.refusal`."""
        widest = max(shape.head_dim, shape.value_head_dim)
        return None if widest <= MAX_HEAD_DIM else f"a head has {widest} dimensions, at most {MAX_HEAD_DIM}"

    def begin_step(self, batch: AttentionBatch) -> None:
        """Takes the step's batch; finds each row's block table and how many keys it has."""
        self._batch = batch
        table_rows = batch.table_rows
        if table_rows is None:
            table_rows = torch.arange(len(batch.kv_lengths), dtype=torch.int32, device=batch.slots.device)
        self._table_rows = table_rows
        self._kv_lengths = batch.kv_lengths
        if batch.chunk_lengths is not None:
            self._kv_lengths = batch.kv_lengths + batch.chunk_lengths

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch, shape = self._batch, layer.shape
        table_rows, kv_lengths = self._table_rows, self._kv_lengths
        assert batch is not None, "attend before begin_step"
        assert layer.norms is None, "queries and keys must arrive normed"
        assert table_rows is not None, "attend before begin_step"
        assert kv_lengths is not None, "attend before begin_step"
        query = turned(layer, batch, query, key, value)
        out = torch.empty(
            (batch.num_tokens, shape.num_heads, shape.value_head_dim), dtype=query.dtype, device=query.device
        )
        invariant_attention(
            layer,
            query,
            block_tables=batch.block_tables,
            table_rows=table_rows,
            query_starts=batch.query_starts,
            kv_lengths=kv_lengths,
            out=out,
            has_chunks=batch.chunk_lengths is not None or batch.num_decode < batch.num_tokens,
        )
        return out.view(batch.num_tokens, -1)
