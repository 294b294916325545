"""Attention batches with scattered blocks, and attention by definition: one query at a time, in float64."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megallm.core_async.device.attention import Attention, AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import CacheShape, PagedCache
from megallm.core_async.device.rope import rotated, table_of
from megallm.core_async.device.rows import Rows
from megallm.core_async.device.step_inputs import inputs_of
from megallm.core_async.messages import Ints, StepPlan, pack_ints

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One step of one layer: rows of (tokens cached before, tokens of this step), decode rows first."""

    parts: list[tuple[int, int]]
    shape: LayerShape
    num_decode: int = 0
    block_size: int = 4
    is_rope_interleaved: bool = False
    rotary_dim: int = 0
    dtype: torch.dtype = torch.float32


def attended(attention: Attention, case: Case, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gives what the backend computes, and the definition: both `[tokens, heads * value_head_dim]`.

    Every slot that no row owns, and every one past a row's end, holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = case.shape
    lengths = [cached + new for cached, new in case.parts]
    max_length = -(-max(lengths) // case.block_size) * case.block_size
    rows = Rows(
        max_requests=len(lengths), max_sequence_length=max_length, block_size=case.block_size, device=CPU
    )
    num_blocks = rows.block_tables.size + 3
    rows.block_tables[:] = (
        np.random.default_rng(seed)
        .permutation(num_blocks)[: rows.block_tables.size]
        .reshape(rows.block_tables.shape)
    )
    layer = _poisoned_layer(case, num_blocks, generator)
    batch = _batch(case, rows, max_length)
    full = [
        tuple(
            torch.randn(length, heads, dim, generator=generator).to(case.dtype)
            for heads, dim in (
                (shape.num_heads, shape.head_dim),
                (shape.num_kv_heads, shape.head_dim),
                (shape.num_kv_heads, shape.value_head_dim),
            )
        )
        for length in lengths
    ]
    expected: list[Tensor] = []
    for row, ((cached, _), (query, key, value)) in enumerate(zip(case.parts, full, strict=True)):
        turned_query, turned_key = _turned(case, query, max_length), _turned(case, key, max_length)
        for position in range(cached):
            block = int(rows.block_tables[row, position // case.block_size])
            layer.cache.keys[block, position % case.block_size] = turned_key[position]
            layer.cache.values[block, position % case.block_size] = value[position]
        expected.append(_by_definition(shape, layer.sinks, turned_query, turned_key, value)[cached:])
    # strided, as the parts of one projection are
    query, key, value = (
        _strided(
            torch.cat([parts[which][cached:] for (cached, _), parts in zip(case.parts, full, strict=True)])
        )
        for which in range(3)
    )
    attention.begin_step(batch)
    return attention.attend(layer, query, key, value), torch.cat(expected)


def _poisoned_layer(case: Case, num_blocks: int, generator: torch.Generator) -> PagedLayer:
    """Gives a layer whose cache holds NaN alone."""
    shape = case.shape
    cache = PagedCache(
        [CacheShape(shape.num_kv_heads, shape.head_dim, shape.value_head_dim)],
        num_blocks=num_blocks,
        block_size=case.block_size,
        dtype=case.dtype,
        device=CPU,
    )
    cache.allocate()
    cache.layers[0].keys.fill_(torch.nan)
    cache.layers[0].values.fill_(torch.nan)
    sinks = torch.randn(shape.num_heads, generator=generator).to(case.dtype) if shape.has_sinks else None
    return PagedLayer(shape=shape, cache=cache.layers[0], sinks=sinks)


def _batch(case: Case, rows: Rows, max_length: int) -> AttentionBatch:
    nothing = Ints(b"")
    plan = StepPlan(
        step=1,
        num_decode=case.num_decode,
        rows=pack_ints(list(range(len(case.parts)))),
        starts=pack_ints([cached for cached, _ in case.parts]),
        lengths=pack_ints([new for _, new in case.parts]),
        samples=bytes(len(case.parts)),
        tokens=pack_ints([1] * sum(new for _, new in case.parts[case.num_decode :])),
        new_rows=[],
        changed_rows=nothing,
        changed_starts=nothing,
        changed_counts=nothing,
        blocks=nothing,
    )
    rope = None
    if case.shape.uses_rope:
        rope = table_of(
            _angles(case, max_length), factor=1.25, is_interleaved=case.is_rope_interleaved, dtype=case.dtype
        )
    return inputs_of(plan, rows, block_size=case.block_size, device=CPU, rope=rope).batch


def _angles(case: Case, max_length: int) -> Tensor:
    angles = torch.arange(float(max_length))[:, None] * 0.8 ** torch.arange(case.rotary_dim // 2)
    return angles.repeat_interleave(2, -1) if case.is_rope_interleaved else torch.cat((angles, angles), -1)


def _turned(case: Case, vectors: Tensor, max_length: int) -> Tensor:
    if not case.shape.uses_rope:
        return vectors
    table = table_of(
        _angles(case, max_length), factor=1.25, is_interleaved=case.is_rope_interleaved, dtype=case.dtype
    )
    count = len(vectors)
    return rotated(
        vectors, table.cosines[:count], table.sines[:count], is_interleaved=case.is_rope_interleaved
    )


def _by_definition(
    shape: LayerShape, sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    out = torch.empty(len(query), shape.num_heads, shape.value_head_dim, dtype=torch.float64)
    for position in range(len(query)):
        first = 0 if shape.window is None else max(0, position - shape.window)
        for head in range(shape.num_heads):
            group = head * shape.num_kv_heads // shape.num_heads
            seen = slice(first, position + 1)
            scores = key[seen, group].double() @ query[position, head].double() * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * (scores / shape.softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double()[None]))
            weights = scores.softmax(-1)[: position + 1 - first]
            out[position, head] = weights @ value[seen, group].double()
    return out.flatten(1)


def _strided(tensor: Tensor) -> Tensor:
    tokens, heads, dim = tensor.shape
    wide = tensor.new_full((tokens, heads, dim + 3), torch.nan)
    wide[..., :dim] = tensor
    return wide[..., :dim]
