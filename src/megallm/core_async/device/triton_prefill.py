"""Attention of rows with several queries on a paged cache: whole prompts, and chunks with tokens before.

After "FlashAttention-2" (Dao, 2023): a program takes a tile of one row's queries, with all query heads of
one kv head in it, and goes over the row's keys once. Knows tensors and tables; knows no step. Import it
only where it runs: Triton comes with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# (what a kernel's parameters are is Triton's own matter)

import torch
import triton
import triton.language as tl
from torch import Tensor

from megallm.core_async.device.attention import PagedLayer
from megallm.core_async.device.triton_launch import chained, follow

LOG2_E = 1.4426950408889634
QUERIES = 128
"""Query heads of one kv head that a program takes: so many queries, each with all its heads."""
TOKENS = 64
"""Keys that a program takes at a time."""


def prefill_attention(
    layer: PagedLayer,
    query: Tensor,
    *,
    block_tables: Tensor,
    table_rows: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    num_queries: int,
    out: Tensor,
) -> None:
    """Attends for some rows of at most `num_queries` queries in all, one after the other.

    `query_starts`, `[rows + 1]`, are places in `query`, `[tokens, kv_heads, heads per kv head, head_dim]`,
    and `out`, `[tokens, num_heads, value_head_dim]`. A row's last query is its last key's; a row whose
    `kv_lengths` is 0 is left out.
    """
    shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
    _, kv_heads, group, head_dim = query.shape
    is_wide = max(head_dim, shape.value_head_dim) * keys.dtype.itemsize > 256  # noqa: PLR2004 - shared memory
    queries = max(QUERIES // 2 if is_wide else QUERIES, triton.next_power_of_2(group))
    num_rows = len(kv_lengths)
    # row r's tiles begin at tile `queries before it // queries of a tile + r`: a few tiles stay empty
    grid = (num_queries // (queries // group) + num_rows, kv_heads)
    _attend_tiles[grid](
        query,
        keys,
        values,
        block_tables,
        table_rows,
        query_starts,
        kv_lengths,
        out if layer.sinks is None else layer.sinks,
        out,
        shape.scale * LOG2_E,
        num_rows,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        QUERIES=queries,
        DIM=head_dim,
        DIM_WIDTH=triton.next_power_of_2(max(16, head_dim)),
        VALUE_DIM=shape.value_head_dim,
        VALUE_WIDTH=triton.next_power_of_2(max(16, shape.value_head_dim)),
        BLOCK=keys.shape[1],
        TOKENS=TOKENS // 2 if is_wide else TOKENS,
        WINDOW=-1 if shape.window is None else shape.window,
        HAS_SINKS=layer.sinks is not None,
        PRECISION="ieee" if keys.dtype is torch.float32 else "tf32",
        num_warps=8 if queries >= QUERIES else 4,
        num_stages=1 if keys.dtype is torch.float32 else 2 if is_wide else 3,
        **chained(query),
    )


@triton.jit
def _tile_of_keys(
    queries, query_positions, first, end, best, total, mixed, keys, values, table, scale,
    key_block, key_slot, value_block, value_slot, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Goes over one tile of keys; `keys` and `values` point at the program's kv head."""
    dims = tl.arange(0, DIM_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    positions = first + tl.arange(0, TOKENS)
    is_key = positions < end
    blocks = tl.load(table + positions // BLOCK, mask=is_key, other=0).to(tl.int64)
    slots = positions % BLOCK
    key_at = blocks * key_block + slots * key_slot
    some_keys = tl.load(
        keys + key_at[:, None] + dims[None, :], mask=is_key[:, None] & (dims < DIM)[None, :], other=0.0
    )
    scores = tl.dot(queries, tl.trans(some_keys), input_precision=PRECISION) * scale
    if IS_MASKED:
        distances = query_positions[:, None] - positions[None, :]
        is_seen = (distances >= 0) & is_key[None, :]
        if WINDOW >= 0:
            is_seen = is_seen & (distances <= WINDOW)
        scores = tl.where(is_seen, scores, -1.0e30)
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    if IS_MASKED:
        # a query that sees nothing of the tile has no best yet
        weights = tl.where(is_seen, weights, 0.0)
    shrink = tl.exp2(best - new_best)
    value_at = blocks * value_block + slots * value_slot
    some_values = tl.load(
        values + value_at[:, None] + value_dims[None, :],
        mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(some_values.dtype), some_values, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def _place_of(tile, query_starts, num_rows, per_tile: tl.constexpr):
    """Finds a tile's row, where the row's queries begin, how many it has, and the tile's first of them."""
    origin = tl.load(query_starts)
    row = -1
    for first in range(0, num_rows, 128):
        some = first + tl.arange(0, 128)
        starts = tl.load(query_starts + some, mask=some < num_rows, other=0) - origin
        row += tl.sum(((starts // per_tile + some <= tile) & (some < num_rows)).to(tl.int32), 0)
    query_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    return row, query_start, num_queries, (tile - (query_start - origin) // per_tile - row) * per_tile


@triton.jit
def _with_sink(sink, best, total, mixed):
    """Gives the sums with one more score that has no value."""
    new_best = tl.maximum(best, sink)
    shrink = tl.exp2(best - new_best)
    return total * shrink + tl.exp2(sink - new_best), mixed * shrink[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _attend_tiles(
    query, keys, values, block_tables, table_rows, query_starts, kv_lengths, sinks, out, scale, num_rows,
    query_row, query_kv_head, query_head, key_block, key_slot, key_head, value_block, value_slot,
    value_head, table_row, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    kv_head = tl.program_id(1)
    per_tile: tl.constexpr = QUERIES // GROUP
    # the last rows' tiles start first: in a step of decode rows and chunks they have work
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, query_start, num_queries, first_query = _place_of(tile, query_starts, num_rows, per_tile)
    length = tl.load(kv_lengths + row)
    if (first_query >= num_queries) | (length == 0):
        return
    lines = tl.arange(0, QUERIES)
    line_query = first_query + lines // GROUP
    is_line = (lines < per_tile * GROUP) & (line_query < num_queries)
    tokens = (query_start + line_query).to(tl.int64)
    dims, value_dims = tl.arange(0, DIM_WIDTH), tl.arange(0, VALUE_WIDTH)
    query_at = tokens * query_row + kv_head * query_kv_head + (lines % GROUP) * query_head
    queries = tl.load(
        query + query_at[:, None] + dims[None, :], mask=is_line[:, None] & (dims < DIM)[None, :], other=0.0
    )
    first_position = length - num_queries + first_query
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_row
    head_keys, head_values = keys + kv_head * key_head, values + kv_head * value_head
    best = tl.full((QUERIES,), -1.0e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    # keys that every query of the tile sees need no mask; where there is a window, none are
    begin, unmasked_end = 0, (first_position + 1) // TOKENS * TOKENS
    if WINDOW >= 0:
        begin = tl.maximum(first_position - WINDOW, 0) // TOKENS * TOKENS
        unmasked_end = begin
    end = tl.minimum(first_position + per_tile, length)
    for first in range(begin, unmasked_end, TOKENS):
        best, total, mixed = _tile_of_keys(
            queries, first_position + lines // GROUP, first, end, best, total, mixed, head_keys, head_values,
            table, scale, key_block, key_slot, value_block, value_slot,
            DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW, PRECISION, False,
        )  # fmt: skip
    for first in range(unmasked_end, end, TOKENS):
        best, total, mixed = _tile_of_keys(
            queries, first_position + lines // GROUP, first, end, best, total, mixed, head_keys, head_values,
            table, scale, key_block, key_slot, value_block, value_slot,
            DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW, PRECISION, True,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + lines % GROUP).to(tl.float32) * 1.4426950408889634
        total, mixed = _with_sink(sink, best, total, mixed)
    heads = (tokens * tl.num_programs(1) + kv_head) * GROUP + lines % GROUP
    # lines past the row's queries may have seen nothing; they are not stored
    mixed /= tl.where(total > 0, total, 1.0)[:, None]
    is_stored = is_line[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(
        out + heads[:, None] * VALUE_DIM + value_dims[None, :], mixed.to(out.dtype.element_ty), mask=is_stored
    )
