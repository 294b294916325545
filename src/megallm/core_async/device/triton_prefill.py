"""Attention of rows with several queries on a paged cache: whole prompts, and chunks with tokens before.

After "FlashAttention-2" (Dao, 2023): a program takes a tile of one row's queries, with all query heads of
one kv head in it (`triton_work.query_tiles`), and goes over the row's keys once. Where a tile of keys lies
within a block it is read as one, else key by key. Knows tensors and tables; knows no step. Import it only
where it runs: Triton comes with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# (what a kernel's parameters are is Triton's own matter)

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.layer_constants import constants_of
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_decode import block_at, capped
from megallm.core_async.device.triton_launch import chained, follow
from megallm.core_async.device.triton_work import FIELDS, QueryTiles

LOG2_E = 1.4426950408889634
LINES = 64
"""Query heads of one kv head that a program takes: so many queries, each with all its heads."""
FEW_KEYS = 512
"""Up to so many keys a program takes `few_tokens` at a time: it reads fewer that no query sees."""


class PrefillTuning(Struct, frozen=True):
    """How the kernel is compiled."""

    lines: int
    """Query heads of one kv head that a program takes."""
    tokens: int
    """Keys that a program takes at a time."""
    few_tokens: int
    """The same where it has few keys."""
    num_warps: int
    num_stages: int


def tuning_for(shape: LayerShape, dtype: torch.dtype) -> PrefillTuning:
    """Gives what was fastest on an H200."""
    is_wide = max(shape.head_dim, shape.value_head_dim) * dtype.itemsize > 256  # noqa: PLR2004 - shared memory
    return PrefillTuning(
        lines=LINES,
        tokens=32 if is_wide else 64,
        few_tokens=32,
        num_warps=4,
        num_stages=1 if dtype is torch.float32 else 2 if is_wide else 3,
    )


def queries_of_tile(shape: LayerShape, dtype: torch.dtype, tuning: PrefillTuning | None = None) -> int:
    """Gives how many queries one program takes."""
    tuned = tuning_for(shape, dtype) if tuning is None else tuning
    group = shape.num_heads // shape.num_kv_heads
    return max(tuned.lines, triton.next_power_of_2(group)) // group


def prefill_attention(
    layer: PagedLayer,
    query: Tensor,
    *,
    block_tables: Tensor,
    tiles: QueryTiles,
    out: Tensor,
    tuning: PrefillTuning | None = None,
) -> None:
    """Attends for the tiles' queries, of `query`, `[tokens, kv_heads, heads per kv head, head_dim]`.

    `out` is `[tokens, num_heads, value_head_dim]`; `tiles` are of `queries_of_tile` queries. They and the
    tables are read at once: they are older than the kernel launched before this one (`triton_launch`).
    """
    shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
    kv_heads, group = query.shape[1:3]
    tuned = tuning_for(shape, keys.dtype) if tuning is None else tuning
    lines = max(tuned.lines, triton.next_power_of_2(group))
    assert tiles.queries == lines // group, f"tiles of {tiles.queries} queries, {lines} lines, {group} heads"
    launch(
        _attend_tiles,
        (len(tiles.tiles), kv_heads),
        query,
        keys,
        values,
        block_tables,
        tiles.tiles,
        out if layer.sinks is None else layer.sinks,
        out,
        shape.scale * LOG2_E,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        LINES=lines,
        TOKENS=tuned.tokens,
        FEW_TOKENS=tuned.few_tokens,
        FEW_KEYS=FEW_KEYS,
        PRECISION="ieee" if keys.dtype is torch.float32 else "tf32",
        FIELDS=FIELDS,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **constants_of(layer),
        **chained(query),
    )


@triton.jit(do_not_specialize=["table_row"])
def _attend_tiles(
    query, keys, values, block_tables, tiles, sinks, out, scale, query_row, query_kv_head, query_head,
    key_block, key_slot, key_head, value_block, value_slot, value_head, table_row, GROUP: tl.constexpr,
    LINES: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, FEW_TOKENS: tl.constexpr,
    FEW_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    # the list and the tables are older than the kernel ahead: they are read while that still runs
    # (the last rows' tiles start first: in a step of decode rows and chunks they have work)
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * FIELDS
    first_token, num_queries, first_position = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    table = block_tables + tl.load(tile).to(tl.int64) * table_row
    begin = 0
    if WINDOW >= 0:
        begin = tl.maximum(first_position - WINDOW, 0) // TOKENS * TOKENS
    is_tile = num_queries > 0
    end = first_position + num_queries  # a row's last query is its last key's
    blocks = tl.load(block_at(table, begin, end, BLOCK, TOKENS), mask=is_tile, other=0).to(tl.int64)
    few_blocks = tl.load(block_at(table, begin, end, BLOCK, FEW_TOKENS), mask=is_tile, other=0).to(tl.int64)
    follow(CHAINED)
    if not is_tile:
        return
    queries = _queries_of(
        query, first_token, num_queries, kv_head, query_row, query_kv_head, query_head, GROUP, LINES, DIM,
        DIM_WIDTH,
    )  # fmt: skip
    head_keys, head_values = keys + kv_head * key_head, values + kv_head * value_head
    positions = first_position + tl.arange(0, LINES) // GROUP
    best = tl.full((LINES,), -1.0e20, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    mixed = tl.zeros((LINES, VALUE_WIDTH), tl.float32)
    if FEW_TOKENS < TOKENS and end - begin <= FEW_KEYS:
        best, total, mixed = _with_all_keys(
            queries, positions, few_blocks, first_position, begin, end, best, total, mixed, head_keys,
            head_values, table, scale, key_block, key_slot, value_block, value_slot, DIM, DIM_WIDTH,
            VALUE_DIM, VALUE_WIDTH, BLOCK, FEW_TOKENS, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    else:
        best, total, mixed = _with_all_keys(
            queries, positions, blocks, first_position, begin, end, best, total, mixed, head_keys,
            head_values, table, scale, key_block, key_slot, value_block, value_slot, DIM, DIM_WIDTH,
            VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    _store(
        out, sinks, best, total, mixed, first_token, num_queries, kv_head, tl.num_programs(1), GROUP, LINES,
        VALUE_DIM, VALUE_WIDTH, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _queries_of(
    query, first_token, num_queries, kv_head, query_row, query_kv_head, query_head, GROUP: tl.constexpr,
    LINES: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
):  # fmt: skip
    """Gives a tile's queries: a line for each head of each, zeros past the last."""
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM_WIDTH)
    tokens = (first_token + lines // GROUP).to(tl.int64)
    at = tokens * query_row + kv_head * query_kv_head + (lines % GROUP) * query_head
    is_query = (lines // GROUP < num_queries)[:, None] & (dims < DIM)[None, :]
    return tl.load(query + at[:, None] + dims[None, :], mask=is_query, other=0.0)


@triton.jit
def _with_all_keys(
    queries, positions, blocks, first_position, begin, end, best, total, mixed, keys, values, table, scale,
    key_block, key_slot, value_block, value_slot, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gives the sums with all keys from `begin` on, the first tile's in `blocks`."""
    # keys that every query of the tile sees need no mask; where there is a window, none are
    unmasked_end = begin if WINDOW >= 0 else (first_position + 1) // TOKENS * TOKENS
    for first in range(begin, unmasked_end, TOKENS):
        best, total, mixed, blocks = _with_keys(
            queries, positions, blocks, first, end, best, total, mixed, keys, values, table, scale, key_block,
            key_slot, value_block, value_slot, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS,
            WINDOW, SOFTCAP, PRECISION, False,
        )  # fmt: skip
    if BLOCK % TOKENS != 0 and WINDOW < 0:
        # taken from the loop above, they would there be looked up a second time, in another layout
        blocks = tl.load(block_at(table, unmasked_end, end, BLOCK, TOKENS)).to(tl.int64)
    for first in range(unmasked_end, end, TOKENS):
        best, total, mixed, blocks = _with_keys(
            queries, positions, blocks, first, end, best, total, mixed, keys, values, table, scale, key_block,
            key_slot, value_block, value_slot, DIM, DIM_WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK, TOKENS,
            WINDOW, SOFTCAP, PRECISION, True,
        )  # fmt: skip
    return best, total, mixed


@triton.jit
def _with_keys(
    queries, positions, blocks, first, end, best, total, mixed, keys, values, table, scale, key_block,
    key_slot, value_block, value_slot, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Gives the sums with one tile of keys more, and the blocks of the next tile.

    `keys` and `values` point at the program's kv head.
    """
    key_at, value_at, following = _places_of_keys(
        blocks, first, end, keys, values, table, key_block, key_slot, value_block, value_slot,
        DIM_WIDTH, VALUE_WIDTH, BLOCK, TOKENS,
    )  # fmt: skip
    scores = _scores_of(
        queries, key_at, positions, first, scale, DIM, DIM_WIDTH, TOKENS, WINDOW, SOFTCAP,
        PRECISION, IS_MASKED,
    )  # fmt: skip
    best, total, mixed = _mixed_with(
        scores, scale, value_at, first, end, best, total, mixed, VALUE_DIM, VALUE_WIDTH, TOKENS, SOFTCAP,
        PRECISION, IS_MASKED,
    )  # fmt: skip
    return best, total, mixed, following


@triton.jit
def _places_of_keys(
    blocks, first, end, keys, values, table, key_block, key_slot, value_block, value_slot,
    DIM_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gives where the keys and values from `first` lie, and the blocks of the tile after them."""
    dims, value_dims = tl.arange(0, DIM_WIDTH)[None, :], tl.arange(0, VALUE_WIDTH)[None, :]
    tokens = tl.arange(0, TOKENS)
    # looked up a tile ahead, so that the tiles after it can be on their way
    next_first = tl.minimum(first + TOKENS, end - 1)
    following = tl.load(block_at(table, next_first, end, BLOCK, TOKENS)).to(tl.int64)
    if BLOCK % TOKENS == 0:
        slot = first % BLOCK
        key_at = keys + blocks * key_block + slot * key_slot + (tokens * key_slot)[:, None] + dims
        value_at = (
            values + blocks * value_block + slot * value_slot + (tokens * value_slot)[:, None] + value_dims
        )
    else:
        slots = ((0 if TOKENS % BLOCK == 0 else first) + tokens) % BLOCK
        key_at = keys + (blocks * key_block + slots * key_slot)[:, None] + dims
        value_at = values + (blocks * value_block + slots * value_slot)[:, None] + value_dims
    return key_at, value_at, following


@triton.jit
def _scores_of(
    queries, key_at, query_positions, first, scale, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Gives the scores of one tile of keys; without a softcap they are yet to be scaled."""
    # what a slot holds that no token was written to may be read as a key, but not as a value
    if DIM == DIM_WIDTH:
        some_keys = tl.load(key_at)
    else:
        some_keys = tl.load(key_at, mask=(tl.arange(0, DIM_WIDTH) < DIM)[None, :], other=0.0)
    scores = tl.dot(queries, tl.trans(some_keys), input_precision=PRECISION)
    if SOFTCAP > 0:
        scores = capped(scores * scale, SOFTCAP)
    if IS_MASKED:
        scores = _hidden(scores, query_positions, first, TOKENS, WINDOW)
    return scores


@triton.jit
def _hidden(scores, query_positions, first, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Gives scores without those of keys that a query doesn't see."""
    # keys past the row's last query are after every query that is stored
    tokens, last = tl.arange(0, TOKENS)[None, :], (query_positions - first)[:, None]
    is_seen = tokens <= last
    if WINDOW >= 0:
        is_seen = is_seen & (tokens >= last - WINDOW)
    return tl.where(is_seen, scores, -1.0e30)


@triton.jit
def _mixed_with(
    scores, scale, value_at, first, end, best, total, mixed, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Gives the sums with one tile of keys more."""
    factor = 1.0 if SOFTCAP > 0 else scale
    # where a query has seen nothing yet, what is hidden is far below even its first best, of -1e20
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    is_value = (tl.arange(0, VALUE_WIDTH) < VALUE_DIM)[None, :]
    if IS_MASKED:
        is_key = first + tl.arange(0, TOKENS) < end
        some_values = tl.load(value_at, mask=is_key[:, None] & is_value, other=0.0)
    elif VALUE_DIM < VALUE_WIDTH:
        some_values = tl.load(value_at, mask=is_value, other=0.0)
    else:
        some_values = tl.load(value_at)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weights.to(some_values.dtype), some_values, mixed, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def _store(
    out, sinks, best, total, mixed, first_token, num_queries, kv_head, kv_heads, GROUP: tl.constexpr,
    LINES: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Stores what the sums of a tile come to."""
    lines, value_dims = tl.arange(0, LINES), tl.arange(0, VALUE_WIDTH)
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + lines % GROUP).to(tl.float32) * 1.4426950408889634
        total, mixed = _with_sink(sink, best, total, mixed)
    tokens = (first_token + lines // GROUP).to(tl.int64)
    heads = (tokens * kv_heads + kv_head) * GROUP + lines % GROUP
    # lines past the row's queries may have seen nothing; they are not stored
    mixed *= (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    is_stored = (lines // GROUP < num_queries)[:, None] & (value_dims < VALUE_DIM)[None, :]
    at = heads[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _with_sink(sink, best, total, mixed):
    """Gives the sums with one more score that has no value."""
    new_best = tl.maximum(best, sink)
    shrink = tl.exp2(best - new_best)
    return total * shrink + tl.exp2(sink - new_best), mixed * shrink[:, None]
