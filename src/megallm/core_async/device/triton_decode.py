"""Attention of decode rows on a paged cache: one query a row, its keys split over programs.

After "Flash-Decoding for long-context inference" (Dao, Haziza, Massa and Sizov, 2023): a program takes a
part of one row's keys for one kv head, all query heads of the head at once as rows of one product. Which part
comes from a list made once a step (`triton_work.row_parts`); where rows may have several, a second kernel
joins them.

Kernels in Triton. Knows tensors and tables; knows no step. Import it only where it runs: Triton comes
with torch's CUDA builds alone.
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

from megallm.core_async.device.attention import PagedLayer
from megallm.core_async.device.layer_constants import constants_of
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_heads import NewTokens, arguments_of, rules_of, spread, take_new
from megallm.core_async.device.triton_join import join
from megallm.core_async.device.triton_launch import alone, chained, follow
from megallm.core_async.device.triton_work import FIELDS, KEYS, RowParts

LOG2_E = 1.4426950408889634
MIN_ROWS = 16
"""Rows that one product has at least; a kv head with fewer query heads leaves some empty."""
CORES = 132
"""Multiprocessors of an H200: three programs fit each, or two with one tile of keys more on their way."""


class DecodeTuning(Struct, frozen=True):
    """How the kernel is compiled and launched for a step of so many rows."""

    max_cuts: int
    """Parts beyond one a row; none where there are rows enough without."""
    min_keys: int
    """Keys that a part has at least."""
    tokens: int
    """Keys that a program takes at a time, at most `KEYS`: a part begins at a multiple of them."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers of a thread, so that more programs fit; None is as many as it likes."""


def tuning_for(
    num_rows: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, *, is_mixed: bool = False
) -> DecodeTuning:
    """Gives what was fastest on an H200. `is_mixed`: rows may have no keys, any number of them."""
    is_wide = head_dim * dtype.itemsize > 256  # noqa: PLR2004 - bytes of a key that fit several times over
    units = num_rows * kv_heads
    enough = triton.cdiv(2 * CORES, kv_heads)
    # rows that fill half of the card's places are left whole; of fewer the longest are cut
    is_short = units <= 2 * CORES * 15 // 16
    if is_short:
        max_cuts = enough if num_rows > 1 else triton.cdiv(CORES, kv_heads)
    else:
        max_cuts = triton.cdiv(3 * CORES, kv_heads) if 2 * CORES < units <= 3 * CORES else 0
    if is_mixed:
        max_cuts = max(max_cuts, enough)
    # many small programs a multiprocessor, where three would leave the last ones to run alone, and where
    # two have little to compute
    is_uneven = 3 * CORES < units <= 4 * CORES
    is_even = not is_short and units <= 2 * CORES and group <= 2  # noqa: PLR2004 - query heads of a key
    if (is_uneven or is_even) and not is_wide:
        return DecodeTuning(max_cuts=max_cuts, min_keys=64, tokens=32, num_warps=2, num_stages=4)
    return DecodeTuning(
        max_cuts=max_cuts,
        min_keys=64,
        tokens=32 if is_wide else 64,
        num_warps=4,
        num_stages=2 if is_wide else 4 if is_short else 3,
    )


def decode_attention(
    layer: PagedLayer,
    query: Tensor,
    *,
    block_tables: Tensor,
    parts: RowParts,
    out: Tensor,
    tuning: DecodeTuning | None = None,
    new: NewTokens | None = None,
    is_just_listed: bool = False,
) -> None:
    """Attends with `query`, `[rows, kv_heads, heads per kv head, head_dim]`, into `out`.

    `out` is `[rows, num_heads, value_head_dim]`. A row of length 0 is left out. With `new`, a token a row,
    queries are normed and turned here, and so is each row's last key, which is written with its value.
    `is_just_listed`: the kernel ahead makes the parts.
    """
    shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
    num_rows, kv_heads, group, head_dim = query.shape
    tuned = tuning or tuning_for(num_rows, kv_heads, group, head_dim, keys.dtype)
    assert tuned.tokens <= KEYS, (tuned.tokens, KEYS)
    sums = sizes = out
    if parts.is_cut:
        sums = query.new_empty(len(parts.parts) * shape.num_heads, shape.value_head_dim, dtype=torch.float32)
        sizes = query.new_empty(len(sums), dtype=torch.float32)
    launch(
        _attend_parts,
        (kv_heads, len(parts.parts)),
        query,
        keys,
        values,
        block_tables,
        parts.parts,
        parts.num_parts,
        out if layer.sinks is None else layer.sinks,
        out,
        sums,
        sizes,
        shape.scale * LOG2_E,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        GROUP_WIDTH=max(tuned.num_warps, triton.next_power_of_2(group)),  # a head's sums stay in a warp
        GROUP_ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        TOKENS=tuned.tokens,
        IS_CUT=parts.is_cut,
        PRECISION="ieee" if keys.dtype is torch.float32 else "tf32",
        FIELDS=FIELDS,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **({} if tuned.max_registers is None else {"maxnreg": tuned.max_registers}),
        **constants_of(layer),
        **arguments_of(new, query),
        **(alone() if is_just_listed else chained(query)),
    )
    if parts.is_cut:
        join(layer, parts, sums, sizes, out)


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """Gives scores in units of log2(e), held below the softcap where there is one."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        scores = SOFTCAP * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFTCAP))))
    return scores


@triton.jit
def block_at(table, first, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Gives where the block of the keys from `first` is; `[TOKENS]`, each key's, where they have several."""
    at = first // BLOCK
    if BLOCK % TOKENS != 0:
        # where whole blocks fill a tile the compiler is to see which keys share one: it looks that up once
        at += ((0 if TOKENS % BLOCK == 0 else first % BLOCK) + tl.arange(0, TOKENS)) // BLOCK
        at = tl.minimum(at, tl.maximum(end - 1, 0) // BLOCK)  # a row's table may end with its last block
    return table + at


@triton.jit
def _some_keys(
    queries, best, total, mixed, block, first, end, first_seen, keys, values, table, scale,
    key_block, key_slot, value_block, value_slot, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes over one tile of keys; `keys` and `values` point at the program's kv head."""
    dims, value_dims = tl.arange(0, DIM_WIDTH)[None, :], tl.arange(0, VALUE_WIDTH)[None, :]
    tokens = tl.arange(0, TOKENS)
    positions = first + tokens
    is_seen = positions < end
    # looked up a tile ahead, so that the tiles after it can be on their way
    following = tl.load(block_at(table, tl.minimum(first + TOKENS, end - 1), end, BLOCK, TOKENS)).to(tl.int64)
    if BLOCK % TOKENS == 0:
        slot = first % BLOCK
        key_at = keys + block * key_block + slot * key_slot + ((tokens * key_slot)[:, None] + dims)
        value_at = values + block * value_block + slot * value_slot
        value_at += (tokens * value_slot)[:, None] + value_dims
    else:
        slots = ((0 if TOKENS % BLOCK == 0 else first) + tokens) % BLOCK
        key_at = keys + (block * key_block + slots * key_slot)[:, None] + dims
        value_at = values + (block * value_block + slots * value_slot)[:, None] + value_dims
    if WINDOW >= 0:
        is_seen = is_seen & (positions >= first_seen)
    some_keys = tl.load(key_at, mask=is_seen[:, None] & (dims < DIM), other=0.0)
    scores = capped(tl.dot(queries, tl.trans(some_keys), input_precision=PRECISION) * scale, SOFTCAP)
    scores = tl.where(is_seen[None, :], scores, -1.0e30)
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    if WINDOW >= 0:
        # a part that begins before the window may see nothing at first
        weights = tl.where(is_seen[None, :], weights, 0.0)
    shrink = tl.exp2(best - new_best)
    some_values = tl.load(value_at, mask=is_seen[:, None] & (value_dims < VALUE_DIM), other=0.0)
    mixed *= shrink[:, None]
    mixed += tl.dot(weights.to(some_values.dtype), some_values, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(weights, 1), mixed, following


@triton.jit
def _attend_parts(
    query, keys, values, block_tables, parts, num_parts, sinks, out, sums, sizes, scale, query_row,
    query_kv_head, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_row,
    new_keys, new_values, cosines, sines, query_weight, key_weight, slots, query_epsilon, key_epsilon,
    new_key_row, new_key_head, new_value_row, new_value_head, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_CUT: tl.constexpr,
    PRECISION: tl.constexpr, FIELDS: tl.constexpr, TAKES_NEW: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, NORMS_QUERY: tl.constexpr, NORMS_KEY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    kv_head, place = tl.program_id(0), tl.program_id(1)
    # the list and the tables are older than the kernel ahead: they are read while that still runs
    part = parts + place * FIELDS
    is_part = place < tl.load(num_parts)
    row = tl.load(part + 1, mask=is_part, other=0).to(tl.int64)
    begin, end = tl.load(part + 2, mask=is_part, other=0), tl.load(part + 3, mask=is_part, other=0)
    count, first_seen = tl.load(part + 4), tl.load(part + 5)
    table = block_tables + tl.load(part, mask=is_part, other=0).to(tl.int64) * table_row
    block = tl.load(block_at(table, begin, end, BLOCK, TOKENS)).to(tl.int64)
    if TAKES_NEW:
        heads = tl.arange(0, GROUP_WIDTH)[:, None]
        dims = tl.zeros_like(heads) + tl.arange(0, DIM_WIDTH)[None, :]
        is_newest = end == tl.load(part + 6)
        slot = tl.load(slots + row).to(tl.int64)
        rules = rules_of(
            cosines, sines, query_weight, key_weight, row, dims, DIM, ROTARY_DIM, IS_INTERLEAVED,
            NORMS_QUERY, NORMS_KEY,
        )  # fmt: skip
    follow(CHAINED)
    if end <= begin:
        return
    head_keys, head_values = keys + kv_head * key_head, values + kv_head * value_head
    head_query = query + row * query_row + kv_head * query_kv_head
    if TAKES_NEW:
        queries, key, value = take_new(
            head_query, new_keys + row * new_key_row + kv_head * new_key_head,
            new_values + row * new_value_row + kv_head * new_value_head, head_keys + slot * key_slot,
            head_values + slot * value_slot, rules, heads, dims, tl.arange(0, VALUE_WIDTH), is_newest,
            query_head, query_epsilon, key_epsilon, GROUP, DIM, VALUE_DIM, ROTARY_DIM, IS_INTERLEAVED,
            NORMS_QUERY, NORMS_KEY,
        )  # fmt: skip
        queries, best, total, mixed = _begun(
            queries, key, value, is_newest, scale, GROUP_ROWS, VALUE_WIDTH, SOFTCAP
        )
        end -= is_newest.to(tl.int32)
    else:
        queries, best, total, mixed = _not_begun(
            head_query, query_head, GROUP, GROUP_ROWS, DIM, DIM_WIDTH, VALUE_WIDTH
        )
    for first in range(begin, end, TOKENS):
        best, total, mixed, block = _some_keys(
            queries, best, total, mixed, block, first, end, first_seen, head_keys, head_values, table,
            scale, key_block, key_slot, value_block, value_slot, DIM, DIM_WIDTH, VALUE_DIM,
            VALUE_WIDTH, BLOCK, TOKENS, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    _store_part(
        best, total, mixed, sinks, out, sums, sizes, count, row, place, GROUP, GROUP_ROWS, VALUE_DIM,
        VALUE_WIDTH, HAS_SINKS, IS_CUT,
    )  # fmt: skip


@triton.jit
def _not_begun(
    query, query_head, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads the rows of the products; gives them, and their sums over no key."""
    group, dims = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, DIM_WIDTH)[None, :]
    queries = tl.load(query + group * query_head + dims, mask=(group < GROUP) & (dims < DIM), other=0.0)
    best = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    return queries, best, total, tl.zeros((GROUP_ROWS, VALUE_WIDTH), tl.float32)


@triton.jit
def _begun(
    queries, key, value, is_newest, scale, GROUP_ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gives the rows of the products, and their sums over the newest key, or over none."""
    scores = capped(tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale, SOFTCAP)
    best = spread(tl.where(is_newest, scores, -1.0e30), GROUP_ROWS)
    total = tl.zeros((GROUP_ROWS,), tl.float32) + is_newest.to(tl.float32)
    mixed = tl.zeros((GROUP_ROWS, VALUE_WIDTH), tl.float32) + value.to(tl.float32)[None, :]
    return spread(queries, GROUP_ROWS), best, total, mixed


@triton.jit
def _store_part(
    best, total, mixed, sinks, out, sums, sizes, count, row, place, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_CUT: tl.constexpr,
):  # fmt: skip
    """Stores what a row is, where this is its one part; else what `_join_parts` makes it of."""
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    group, value_dims = tl.arange(0, GROUP_ROWS), tl.arange(0, VALUE_WIDTH)
    is_head = group < GROUP
    is_stored = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    if HAS_SINKS:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if count == 1:
            sink = tl.load(sinks + kv_head * GROUP + group, mask=is_head, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - best)
    # a part may lie before all that its row sees
    mixed /= tl.where(total > 0, total, 1.0)[:, None]
    if count == 1:
        at = ((row * kv_heads + kv_head) * GROUP + group)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=is_stored)
    if IS_CUT:  # noqa: SIM102 - likewise
        if count > 1:
            part_at = (place * kv_heads + kv_head) * GROUP + group
            tl.store(sums + part_at[:, None] * VALUE_DIM + value_dims[None, :], mixed, mask=is_stored)
            tl.store(sizes + part_at, tl.where(total > 0, best + tl.log2(total), -1.0e30), mask=is_head)
