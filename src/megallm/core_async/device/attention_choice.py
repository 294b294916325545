"""Attention by one of two backends, chosen anew for each step by a table of measurements.

Knows what a step looks like; knows no kernel.
"""

from torch import Tensor

from megallm.core_async.device.attention import Attention, AttentionBatch, LayerShape, PagedLayer

MIN_QUERIES = 512
"""Queries of chunks from which on flash-attn is ahead; below, its launch costs more than it saves."""
MIN_KEYS = 8192
"""Keys of the longest row from which on attention is a share of the step that is worth it, and a package
that takes ten seconds to load."""


def takes_flash(batch: AttentionBatch) -> bool:
    """Says which of the two a step runs on: flash-attn for long chunks, our kernels for all others.

    Measured on an H200, chunks of 512 to 4,096 queries on 2,048 to 32,768 keys: our kernels 335 to 453
    TFLOP/s, flash-attn 2 234 to 311, flash-attn 4 520; and our decode kernel reads the cache up to twice as
    fast as flash-attn 2 and 11 times as fast as 4. A captured step counts as long as its rows may be.
    """
    if batch.chunk_lengths is None and batch.num_decode == batch.num_tokens:
        return False
    num_queries = batch.num_tokens if batch.chunk_lengths is not None else batch.num_tokens - batch.num_decode
    return num_queries >= MIN_QUERIES and batch.max_kv_length >= MIN_KEYS


class ChosenAttention:
    """Our kernels for decode rows and short steps, flash-attn for steps with long chunks."""

    def __init__(self, usual: Attention, for_chunks: Attention) -> None:
        self._usual = usual
        self._for_chunks = for_chunks
        self._chosen = usual
        self.name = f"{usual.name} and {for_chunks.name}"
        self.norms_heads = usual.norms_heads and for_chunks.norms_heads

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why one of the two can't run such a layer; see `Attention.refusal`."""
        return self._usual.refusal(shape) or self._for_chunks.refusal(shape)

    def begin_step(self, batch: AttentionBatch) -> None:
        """Chooses the backend of the step's layers."""
        self._chosen = self._for_chunks if takes_flash(batch) else self._usual
        self._chosen.begin_step(batch)

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        return self._chosen.attend(layer, query, key, value)
