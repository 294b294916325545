"""What comes before attention on CUDA: norms of heads, rotary positions, and the cache write.

Knows tensors and a step's batch; knows no attention. Import it only where it runs, as the kernels.
"""

from torch import Tensor

from megallm.core_async.device import triton_layer
from megallm.core_async.device.attention import AttentionBatch, PagedLayer
from megallm.core_async.device.triton_heads import NewTokens


def turned(layer: PagedLayer, batch: AttentionBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Turns and writes keys, writes values; gives `[tokens, kv_heads, heads per kv head, head_dim]`, turned.

    Norms both first, where the layer says so. `query` comes as `Attention.attend` takes it, and is
    overwritten where it may be.
    """
    query, new = unturned(layer, batch, query, key, value)
    triton_layer.turn_and_write(
        query,
        new.key,
        new.value,
        new.cosines,
        new.sines,
        new.slots,
        layer.cache,
        is_interleaved=new.is_interleaved,
        norms=new.norms,
    )
    return query


def unturned(
    layer: PagedLayer, batch: AttentionBatch, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, NewTokens]:
    """Gives queries, by kv head, and what else a kernel needs to do itself what `turned` does."""
    shape = layer.shape
    if query.dim() == 3:  # noqa: PLR2004 - heads not yet by kv head
        query = query.unflatten(1, (shape.num_kv_heads, -1))
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    return query, NewTokens(
        key=key,
        value=value,
        cosines=batch.cosines if shape.uses_rope else None,
        sines=batch.sines if shape.uses_rope else None,
        slots=batch.slots,
        is_interleaved=batch.is_rope_interleaved,
        norms=layer.norms,
    )
