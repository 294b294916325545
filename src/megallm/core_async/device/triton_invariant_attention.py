"""Attention on a paged cache that is the same to the bit for a token, whatever is computed beside it.

After "FlashAttention-2" (Dao, 2023) and "Flash-Decoding" (Dao, Haziza, Massa and Sizov, 2023), with one
rule more: a query's keys fall into parts by their positions alone, each part is summed from its first key
to its last, and parts are joined in order, by the same arithmetic in the same layout for a prompt's
queries and for a decode row's. Keys that a query does not see change no bit of its sums. So one program
may take all parts of its queries, or several programs a part each; the results are equal.

Kernels in Triton. Knows tensors and tables; knows no step. Import it only where it runs.
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
from megallm.core_async.device.layer_constants import constants_of
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_invariant_join import join_parts, joined

LOG2_E = 1.4426950408889634
LINES, FEW_LINES = 64, 16
"""Query heads of one kv head that a program takes: of chunks, and where every row has one query."""
TOKENS = 64
"""Keys that a program takes at a time: lines of the tensor cores' instruction, which has 64."""
PART = 256
"""Keys of a part."""
PROGRAMS = 132 * 2
"""Programs that fill the card."""
_WIDE = 256
"""Bytes of a head from which on a program needs more threads and less memory a key."""


def num_shares_for(num_rows: int, num_kv_heads: int) -> int:
    """Gives among how many programs the parts of a decode row are shared out, in a step of so many rows."""
    return max(1, PROGRAMS // (num_rows * num_kv_heads))


def invariant_attention(
    layer: PagedLayer,
    query: Tensor,
    *,
    block_tables: Tensor,
    table_rows: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    out: Tensor,
    has_chunks: bool = True,
    num_shares: int | None = None,
) -> None:
    """Attends for rows of any number of queries, one after the other, into `out`.

    `query` is `[tokens, kv_heads, heads per kv head, head_dim]`, `out` `[tokens, num_heads, value_head_dim]`.
    Row r has the queries `query_starts[r]` to `query_starts[r + 1]`, whose last is its last key's, and the
    blocks `block_tables[table_rows[r]]`. A row of length 0 is left out. Without chunks every row has one
    query; among how many programs its parts are shared out changes no bit.
    """
    shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
    tokens, kv_heads, group, _ = query.shape
    lines = max(LINES if has_chunks else FEW_LINES, triton.next_power_of_2(group))
    num_rows = len(kv_lengths)
    num_shares = num_shares or (1 if has_chunks else num_shares_for(num_rows, kv_heads))
    parts, parts_best, max_parts = out, out, 1
    if num_shares > 1:
        assert not has_chunks, f"{num_shares} programs a row, and rows may have several queries"
        max_parts = triton.cdiv(block_tables.shape[1] * keys.shape[1], PART)
        most = num_rows * shape.num_heads * max_parts
        parts = query.new_empty((most, shape.value_head_dim), dtype=torch.float32)
        parts_best = query.new_empty((most, 2), dtype=torch.float32)
    launch(
        _attend,
        (num_rows + (tokens // (lines // group) if has_chunks else 0), kv_heads, min(num_shares, max_parts)),
        query,
        keys,
        values,
        block_tables,
        table_rows,
        query_starts,
        kv_lengths,
        out if layer.sinks is None else layer.sinks,
        out,
        parts,
        parts_best,
        shape.scale,
        num_rows,
        max_parts,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        LINES=lines,
        HAS_CHUNKS=has_chunks,
        IS_SHARED=num_shares > 1,
        **_constants(layer),
    )
    if num_shares > 1:
        join_parts(layer, parts, parts_best, kv_lengths, part=PART, out=out)


def _constants(layer: PagedLayer) -> dict[str, int | float | bool]:
    """Gives what the kernel is compiled for, and how, by the layer alone."""
    shape, keys = layer.shape, layer.cache.keys
    is_wide = max(shape.head_dim, shape.value_head_dim) * keys.dtype.itemsize > _WIDE
    return {
        **constants_of(layer),
        "PART": PART,
        "TOKENS": TOKENS,
        "num_warps": 8 if is_wide else 4,
        "num_stages": 2 if is_wide else 3,
        # a product and a sum that were rounded once here and twice there would not be equal
        "enable_fp_fusion": False,
    }


@triton.jit
def _tile_of_keys(
    queries, query_positions, first, end, best, total, mixed, keys, values, table, scale,
    key_block, key_slot, value_block, value_slot, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Goes over one tile of keys; `keys` and `values` point at the program's kv head.

    `queries` are `[dims, lines]` and `mixed` is `[value dims, lines]`: lines are columns, so that a decode
    row's program may have few of them, and the order in which a column is summed stays the same.
    """
    dims, value_dims = tl.arange(0, DIM_WIDTH), tl.arange(0, VALUE_WIDTH)
    positions = first + tl.arange(0, TOKENS)
    is_key = positions < end
    blocks = tl.load(table + positions // BLOCK, mask=is_key, other=0).to(tl.int64)
    slots = positions % BLOCK
    key_at = blocks * key_block + slots * key_slot
    some_keys = tl.load(
        keys + key_at[:, None] + dims[None, :], mask=is_key[:, None] & (dims < DIM)[None, :], other=0.0
    )
    scores = tl.dot(some_keys, queries, input_precision="ieee") * scale
    if SOFTCAP > 0:
        # tanh(x) is 1 - 2 / (exp(2 x) + 1)
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0))
    scores = scores * 1.4426950408889634
    distances = query_positions[None, :] - positions[:, None]
    is_seen = (distances >= 0) & is_key[:, None]
    if WINDOW >= 0:
        is_seen = is_seen & (distances <= WINDOW)
    scores = tl.where(is_seen, scores, -1.0e30)
    new_best = tl.maximum(best, tl.max(scores, 0))
    # a query that sees nothing of the part has no best yet
    weights = tl.where(is_seen, tl.exp2(scores - new_best[None, :]), 0.0)
    shrink = tl.exp2(best - new_best)
    value_at = blocks * value_block + slots * value_slot
    some_values = tl.load(
        values + value_at[:, None] + value_dims[None, :],
        mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    mixed = tl.dot(
        tl.trans(some_values), weights.to(some_values.dtype), mixed * shrink[None, :], input_precision="ieee"
    )
    return new_best, total * shrink + tl.sum(weights, 0), mixed


@triton.jit
def _part(
    queries, query_positions, first_key, last_key, end, keys, values, table, scale, key_block, key_slot,
    value_block, value_slot, LINES: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Goes over one part, keys [first_key, last_key)."""
    best = tl.full((LINES,), -1.0e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    mixed = tl.zeros((VALUE_WIDTH, LINES), tl.float32)
    for first in range(first_key, last_key, TOKENS):
        best, total, mixed = _tile_of_keys(
            queries, query_positions, first, end, best, total, mixed, keys, values, table, scale, key_block,
            key_slot, value_block, value_slot, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW,
            SOFTCAP,
        )  # fmt: skip
    return best, total, mixed


@triton.jit
def _some_parts(
    queries, query_positions, begin, end, keys, values, table, scale, key_block, key_slot, value_block,
    value_slot, parts, parts_best, heads, is_line, LINES: tl.constexpr, DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Goes over the parts that are the program's share, and leaves each for joining."""
    value_dims = tl.arange(0, VALUE_WIDTH)
    is_stored = is_line[None, :] & (value_dims < VALUE_DIM)[:, None]
    first_part = begin // PART
    for part in range(first_part + tl.program_id(2), tl.cdiv(end, PART), tl.num_programs(2)):
        best, total, mixed = _part(
            queries, query_positions, tl.maximum(part * PART, begin), tl.minimum(part * PART + PART, end),
            end, keys, values, table, scale, key_block, key_slot, value_block, value_slot,
            LINES, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW, SOFTCAP,
        )  # fmt: skip
        at = heads + part - first_part
        tl.store(parts + at[None, :] * VALUE_DIM + value_dims[:, None], mixed, mask=is_stored)
        tl.store(parts_best + at * 2, best, mask=is_line)
        tl.store(parts_best + at * 2 + 1, total, mask=is_line)


@triton.jit
def _all_parts(
    queries, query_positions, begin, end, keys, values, table, scale, key_block, key_slot, value_block,
    value_slot, LINES: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Goes over all parts in one loop, so that loads run on across them, and joins them in order."""
    best = tl.full((LINES,), -1.0e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    mixed = tl.zeros((VALUE_WIDTH, LINES), tl.float32)
    whole_best, whole_total, whole = best, total, mixed
    for first in range(begin, end, TOKENS):
        if first % PART == 0:
            whole_best, whole_total, shrink, part_shrink = joined(whole_best, whole_total, best, total)
            whole = whole * shrink[None, :] + mixed * part_shrink[None, :]
            best = tl.full((LINES,), -1.0e30, tl.float32)
            total = tl.zeros((LINES,), tl.float32)
            mixed = tl.zeros((VALUE_WIDTH, LINES), tl.float32)
        best, total, mixed = _tile_of_keys(
            queries, query_positions, first, end, best, total, mixed, keys, values, table, scale, key_block,
            key_slot, value_block, value_slot, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW,
            SOFTCAP,
        )  # fmt: skip
    whole_best, whole_total, shrink, part_shrink = joined(whole_best, whole_total, best, total)
    return whole_best, whole_total, whole * shrink[None, :] + mixed * part_shrink[None, :]


@triton.jit
def _row_of(query_starts, num_rows, per_tile: tl.constexpr):
    """Finds a program's row: row r's tiles begin at tile `queries before it // queries of a tile + r`."""
    # the last rows' tiles start first: they are the long ones
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    origin = tl.load(query_starts)
    row = -1
    for first in range(0, num_rows, 128):
        some = first + tl.arange(0, 128)
        starts = tl.load(query_starts + some, mask=some < num_rows, other=0) - origin
        row += tl.sum(((starts // per_tile + some <= tile) & (some < num_rows)).to(tl.int32), 0)
    return row, tile - (tl.load(query_starts + row) - origin) // per_tile - row


@triton.jit(do_not_specialize=["num_rows", "max_parts"])
def _attend(
    query, keys, values, block_tables, table_rows, query_starts, kv_lengths, sinks, out, parts, parts_best,
    scale, num_rows, max_parts, query_row, query_kv_head, query_head, key_block, key_slot, key_head,
    value_block, value_slot, value_head, table_row, GROUP: tl.constexpr, LINES: tl.constexpr,
    DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    IS_SHARED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    per_tile: tl.constexpr = LINES // GROUP
    row, tile_of_row = tl.program_id(0), 0
    if HAS_CHUNKS:
        row, tile_of_row = _row_of(query_starts, num_rows, per_tile)
    query_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    length = tl.load(kv_lengths + row)
    if (tile_of_row * per_tile >= num_queries) | (length == 0):
        return
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM_WIDTH)
    line_query = tile_of_row * per_tile + lines // GROUP
    is_line = (lines < per_tile * GROUP) & (line_query < num_queries)
    tokens = (query_start + line_query).to(tl.int64)
    query_at = tokens * query_row + kv_head * query_kv_head + (lines % GROUP) * query_head
    queries = tl.load(
        query + query_at[None, :] + dims[:, None], mask=is_line[None, :] & (dims < DIM)[:, None], other=0.0
    )
    first_position = length - num_queries + tile_of_row * per_tile
    query_positions = first_position + lines // GROUP
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_row
    head_keys, head_values = keys + kv_head * key_head, values + kv_head * value_head
    end = tl.minimum(first_position + per_tile, length)
    begin = 0
    if WINDOW >= 0:
        begin = tl.maximum(first_position - WINDOW, 0) // TOKENS * TOKENS
    heads = (tokens * tl.num_programs(1) + kv_head) * GROUP + lines % GROUP
    value_dims = tl.arange(0, VALUE_WIDTH)
    is_stored = is_line[None, :] & (value_dims < VALUE_DIM)[:, None]
    if IS_SHARED:
        _some_parts(
            queries, query_positions, begin, end, head_keys, head_values, table, scale, key_block, key_slot,
            value_block, value_slot, parts, parts_best, heads * max_parts, is_line, LINES, DIM, DIM_WIDTH,
            VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, PART, WINDOW, SOFTCAP,
        )  # fmt: skip
    else:
        best, total, mixed = _all_parts(
            queries, query_positions, begin, end, head_keys, head_values, table, scale, key_block,
            key_slot, value_block, value_slot, LINES, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH,
            BLOCK, TOKENS, PART, WINDOW, SOFTCAP,
        )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks + kv_head * GROUP + lines % GROUP).to(tl.float32) * 1.4426950408889634
            best, total, shrink, _ = joined(best, total, sink, 1.0)
            mixed = mixed * shrink[None, :]
        # lines past the row's queries may have seen nothing; they are not stored
        mixed = mixed / tl.where(total > 0, total, 1.0)[None, :]
        at_out = heads[None, :] * VALUE_DIM + value_dims[:, None]
        tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=is_stored)
