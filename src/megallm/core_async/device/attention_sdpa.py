"""Attention in plain torch: runs on every device and is the reference for the other backends.

Decode rows are gathered in groups of like length; every other row is one call. Reads no slot that
was not written: positions past a row's end are read from the row's first slot, and masked.
"""

from collections.abc import Iterator

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from megallm.core_async.device.attention import AttentionBatch, IntColumn, LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import slots_for
from megallm.core_async.device.rope import rotated

MAX_GATHERED_TOKENS = 1 << 17
"""Most cached tokens gathered for one group of decode rows: bounds the copy of keys and values."""


class _DecodeGroup(Struct, frozen=True, eq=False):
    """Decode rows whose caches are about as long, so that they are padded to one length."""

    tokens: Tensor
    """`[rows]`: index of each row's token in the step."""
    slots: Tensor
    """`[rows, length]`; past a row's end its first slot stands again."""
    distances: Tensor
    """`[rows, length]`: how far before the query each key lies; negative past the row's end."""


class _Chunk(Struct, frozen=True, eq=False):
    """A row with several queries: tokens `first` to `last` of the step."""

    first: int
    last: int
    slots: Tensor
    """`[kv_length]`."""
    is_whole: bool
    """Nothing of the row was cached before this step."""

    @property
    def distances(self) -> Tensor:
        """Gives `[queries, kv_length]`: how far before each query each key lies; negative after it."""
        positions = torch.arange(len(self.slots), device=self.slots.device)
        return positions[self.first - self.last :, None] - positions


class SdpaAttention:
    """Attention by `scaled_dot_product_attention`; by two products where the layer has sinks or a softcap."""

    name = "sdpa"
    norms_heads = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: AttentionBatch | None = None
        self._groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer: it runs all of them."""
        del shape
        return None

    def begin_step(self, batch: AttentionBatch) -> None:
        """Finds the slots that each row's queries read."""
        device = batch.slots.device
        self._batch = batch
        self._masks = {}
        self._groups = [_decode_group(batch, rows, self._block_size, device) for rows in _groups_of(batch)]
        self._chunks = [
            _chunk(batch, row, self._block_size, device)
            for row in range(batch.num_decode, len(batch.host_kv_lengths))
        ]

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch = self._batch
        assert batch is not None, "attend before begin_step"
        assert layer.norms is None, "queries and keys must arrive normed"
        query = query.flatten(1, -2)
        if layer.shape.uses_rope:
            assert batch.cosines is not None
            assert batch.sines is not None
            query = rotated(query, batch.cosines, batch.sines, is_interleaved=batch.is_rope_interleaved)
            key = rotated(key, batch.cosines, batch.sines, is_interleaved=batch.is_rope_interleaved)
        layer.cache.write(key, value, batch.slots)
        shape = layer.shape
        out = query.new_empty(batch.num_tokens, shape.num_heads, shape.value_head_dim)
        for group in self._groups:
            rows = len(group.tokens)
            attended = _softmax_attention(
                # the query heads of one kv head stand as its rows: keys and values need no repeating
                query.index_select(0, group.tokens).view(rows, shape.num_kv_heads, -1, shape.head_dim),
                layer.cache.flat_keys[group.slots].transpose(1, 2),
                layer.cache.flat_values[group.slots].transpose(1, 2),
                mask=self._mask(group, shape.window)[:, None, None],
                shape=shape,
                sinks=None if layer.sinks is None else layer.sinks.view(shape.num_kv_heads, -1, 1),
            )
            out.index_copy_(0, group.tokens, attended.reshape(rows, shape.num_heads, shape.value_head_dim))
        for chunk in self._chunks:
            span = slice(chunk.first, chunk.last)
            has_plain_softmax = layer.sinks is None and shape.softcap is None
            is_causal = chunk.is_whole and shape.window is None and has_plain_softmax
            attended = _softmax_attention(
                query[span].transpose(0, 1)[None],
                (key[span] if chunk.is_whole else layer.cache.flat_keys[chunk.slots]).transpose(0, 1)[None],
                (value[span] if chunk.is_whole else layer.cache.flat_values[chunk.slots]).transpose(0, 1)[
                    None
                ],
                mask=None if is_causal else self._mask(chunk, shape.window),
                shape=shape,
                sinks=None if layer.sinks is None else layer.sinks.view(-1, 1, 1),
            )
            out[span] = attended[0].transpose(0, 1)
        return out.view(batch.num_tokens, -1)

    def _mask(self, part: _DecodeGroup | _Chunk, window: int | None) -> Tensor:
        """Gives where a query may look, made once a step for all layers with the same window."""
        mask = self._masks.get((id(part), window))
        if mask is None:
            distances = part.distances
            mask = distances >= 0
            if window is not None:
                mask &= distances <= window
            self._masks[id(part), window] = mask
        return mask


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, shape: LayerShape, sinks: Tensor | None
) -> Tensor:
    """Gives `[rows, heads, queries, value_head_dim]` of `[rows, heads, queries, head_dim]`.

    Keys and values may have fewer heads. No mask is the causal one. `sinks` are `[heads, queries or 1, 1]`.
    """
    needs_repeat = query.shape[1] != key.shape[1]
    if sinks is None and shape.softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=shape.scale,
            enable_gqa=needs_repeat,
        )
    assert mask is not None
    if needs_repeat:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sink_scores = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink_scores), dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value


def _groups_of(batch: AttentionBatch) -> Iterator[NDArray[np.int64]]:
    """Yields the decode rows in groups whose longest cache is less than twice the shortest."""
    lengths = batch.host_kv_lengths[: batch.num_decode]
    if not len(lengths):
        return
    order = np.argsort(lengths, kind="stable")
    first = 0
    ordered = lengths[order]
    while first < len(order):
        last = int(np.searchsorted(ordered, 2 * int(ordered[first])))
        last = max(first + 1, min(last, first + MAX_GATHERED_TOKENS // int(ordered[last - 1])))
        yield order[first:last]
        first = last


def _decode_group(
    batch: AttentionBatch, rows: NDArray[np.int64], block_size: int, device: torch.device
) -> _DecodeGroup:
    lengths = batch.host_kv_lengths[rows][:, None]
    positions = np.arange(int(lengths.max()), dtype=np.int32)[None]
    distances = lengths - 1 - positions
    read = np.where(distances >= 0, positions, np.int32(0))
    slots = slots_for(batch.host_block_tables, rows[:, None], read, block_size)
    return _DecodeGroup(tokens=_on(rows, device), slots=_on(slots, device), distances=_on(distances, device))


def _chunk(batch: AttentionBatch, row: int, block_size: int, device: torch.device) -> _Chunk:
    positions = np.arange(int(batch.host_kv_lengths[row]), dtype=np.int32)
    slots = slots_for(batch.host_block_tables, np.full(1, row), positions, block_size)
    return _Chunk(
        first=int(batch.host_query_starts[row]),
        last=int(batch.host_query_starts[row + 1]),
        slots=_on(slots, device),
        is_whole=int(batch.host_starts[row]) == 0,
    )


def _on(column: IntColumn | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)
