"""Attention of decode rows on a paged cache: one query a row, its keys split over programs.

After "Flash-Decoding for long-context inference" (Dao, Haziza, Massa and Sizov, 2023): each program takes
a part of one row's keys for one kv head, all query heads of the head at once as rows of one product; a
second kernel joins the parts. How many parts a row may have is fixed by the caller, how many it has comes
from its length on the device, so that one captured launch serves all lengths.

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
from torch import Tensor

from megallm.core_async.device.attention import PagedLayer
from megallm.core_async.device.triton_launch import chained, follow

LOG2_E = 1.4426950408889634
MIN_ROWS = 16
"""Rows that one product has at least; a kv head with fewer query heads leaves some empty."""
TOKENS = 64
"""Keys that a program takes at a time."""
MIN_PART = 64
"""Keys that a part has at least."""
MAX_PARTS = 64
FEW_PROGRAMS = 132 * 2
"""Programs that fill the card once, each with many loads in flight."""
MANY_PROGRAMS = 132 * 4
"""Programs that fill the card with fewer loads in flight each."""
JOINED = 16
"""Parts that are joined at a time."""


def num_parts_for(num_rows: int, num_kv_heads: int) -> int:
    """Gives how many parts a row's keys may be split into, for a step of so many rows."""
    programs = num_rows * num_kv_heads
    if programs >= FEW_PROGRAMS * 15 // 16:  # a step of 32 rows and 8 kv heads is near enough
        return 1
    wanted = FEW_PROGRAMS if programs <= FEW_PROGRAMS // 8 else MANY_PROGRAMS
    return min(MAX_PARTS, triton.cdiv(wanted, programs))


def decode_attention(
    layer: PagedLayer,
    query: Tensor,
    *,
    block_tables: Tensor,
    table_rows: Tensor,
    kv_lengths: Tensor,
    num_parts: int,
    out: Tensor,
) -> None:
    """Attends with `query`, `[rows, kv_heads, heads per kv head, head_dim]`, into `out`.

    Row i's blocks are `block_tables[table_rows[i]]`; `out` is `[rows, num_heads, value_head_dim]`. A row
    whose `kv_lengths` is 0 is left out.
    """
    shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
    rows, kv_heads, group, head_dim = query.shape
    value_dim = shape.value_head_dim
    parts = parts_max = out
    if num_parts > 1:
        parts = query.new_empty(rows * kv_heads * num_parts * group, value_dim, dtype=torch.float32)
        parts_max = query.new_empty(len(parts), dtype=torch.float32)
    sinks = out if layer.sinks is None else layer.sinks
    _attend_parts[(kv_heads, rows, num_parts)](
        query,
        keys,
        values,
        block_tables,
        table_rows,
        kv_lengths,
        sinks,
        out,
        parts,
        parts_max,
        shape.scale * LOG2_E,
        num_parts,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        GROUP_ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        DIM=head_dim,
        DIM_WIDTH=triton.next_power_of_2(max(16, head_dim)),
        VALUE_DIM=value_dim,
        VALUE_WIDTH=triton.next_power_of_2(max(16, value_dim)),
        BLOCK=keys.shape[1],
        TOKENS=_tokens_for(head_dim, keys.dtype),
        MIN_PART=MIN_PART,
        WINDOW=-1 if shape.window is None else shape.window,
        HAS_SINKS=layer.sinks is not None,
        IS_DIRECT=num_parts == 1,
        PRECISION="ieee" if keys.dtype is torch.float32 else "tf32",
        num_warps=4,
        num_stages=_stages_for(rows * kv_heads * num_parts, head_dim, keys.dtype),
        **chained(query),
    )
    if num_parts > 1:
        _join(layer, parts, parts_max, kv_lengths, num_parts=num_parts, out=out)


def _join(
    layer: PagedLayer, parts: Tensor, parts_max: Tensor, kv_lengths: Tensor, *, num_parts: int, out: Tensor
) -> None:
    shape = layer.shape
    value_dim, head_dim, dtype = shape.value_head_dim, shape.head_dim, layer.cache.keys.dtype
    _join_parts[(shape.num_heads, len(kv_lengths))](
        parts,
        parts_max,
        kv_lengths,
        out if layer.sinks is None else layer.sinks,
        out,
        num_parts,
        GROUP=shape.num_heads // shape.num_kv_heads,
        VALUE_DIM=value_dim,
        VALUE_WIDTH=triton.next_power_of_2(value_dim),
        TOKENS=_tokens_for(head_dim, dtype),
        MIN_PART=MIN_PART,
        WINDOW=-1 if shape.window is None else shape.window,
        HAS_SINKS=layer.sinks is not None,
        JOINED=JOINED,
        num_warps=2,
        **chained(out),
    )


def _tokens_for(head_dim: int, dtype: torch.dtype) -> int:
    """Gives how many keys fit a program's share of shared memory, several times over."""
    return TOKENS if head_dim * dtype.itemsize <= 256 else TOKENS // 2  # noqa: PLR2004 - 256 bytes a key


def _stages_for(programs: int, head_dim: int, dtype: torch.dtype) -> int:
    """Gives how many tiles of keys are on their way: more where programs are few, as memory allows."""
    if head_dim * dtype.itemsize > 256:  # noqa: PLR2004 - 256 bytes a key
        return 2
    return 5 if programs <= FEW_PROGRAMS else 4


@triton.jit
def _part_of(length, part, num_parts, TOKENS: tl.constexpr, MIN_PART: tl.constexpr, WINDOW: tl.constexpr):
    """Gives the keys [begin, end) of one part of a row, and how many keys a part has."""
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(length - 1 - WINDOW, 0)
    size = tl.maximum(tl.cdiv(tl.cdiv(length - first, num_parts), TOKENS) * TOKENS, MIN_PART)
    begin = first + part * size
    return begin, tl.minimum(begin + size, length), tl.cdiv(length - first, size)


@triton.jit(do_not_specialize=["num_parts"])
def _attend_parts(
    query, keys, values, block_tables, table_rows, kv_lengths, sinks, out, parts, parts_max, scale,
    num_parts, query_row, query_kv_head, query_head, key_block, key_slot, key_head, value_block, value_slot,
    value_head, table_row, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, MIN_PART: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_DIRECT: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    kv_head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lengths + row)
    begin, end, _ = _part_of(length, part, num_parts, TOKENS, MIN_PART, WINDOW)
    if begin >= length:
        return
    group, dims, value_dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_WIDTH), tl.arange(0, VALUE_WIDTH)
    is_head = group < GROUP
    query_at = row.to(tl.int64) * query_row + kv_head * query_kv_head + group[:, None] * query_head
    queries = tl.load(
        query + query_at + dims[None, :], mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0
    )
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_row
    best = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    mixed = tl.zeros((GROUP_ROWS, VALUE_WIDTH), tl.float32)
    for first in range(begin, end, TOKENS):
        positions = first + tl.arange(0, TOKENS)
        is_seen = positions < end
        blocks = tl.load(table + positions // BLOCK, mask=is_seen, other=0).to(tl.int64)
        slots = positions % BLOCK
        key_at = blocks * key_block + slots * key_slot + kv_head * key_head
        some_keys = tl.load(
            keys + key_at[:, None] + dims[None, :], mask=is_seen[:, None] & (dims < DIM)[None, :], other=0.0
        )
        scores = tl.dot(queries, tl.trans(some_keys), input_precision=PRECISION) * scale
        scores = tl.where(is_seen[None, :], scores, -1.0e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        value_at = blocks * value_block + slots * value_slot + kv_head * value_head
        is_value = is_seen[:, None] & (value_dims < VALUE_DIM)[None, :]
        some_values = tl.load(values + value_at[:, None] + value_dims[None, :], mask=is_value, other=0.0)
        mixed *= shrink[:, None]
        mixed += tl.dot(weights.to(some_values.dtype), some_values, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    is_stored = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    at = row.to(tl.int64) * tl.num_programs(0) + kv_head
    if IS_DIRECT:
        if HAS_SINKS:
            sink = tl.load(sinks + kv_head * GROUP + group, mask=is_head, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - best)
        at = (at * GROUP + group)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_stored)
    else:
        at = (at * num_parts + part) * GROUP + group
        tl.store(
            parts + at[:, None] * VALUE_DIM + value_dims[None, :], mixed / total[:, None], mask=is_stored
        )
        tl.store(parts_max + at, best + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["num_parts"])
def _join_parts(
    parts, parts_max, kv_lengths, sinks, out, num_parts, GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    MIN_PART: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, JOINED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lengths + row)
    if length == 0:
        return
    _, _, count = _part_of(length, 0, num_parts, TOKENS, MIN_PART, WINDOW)
    dims = tl.arange(0, VALUE_WIDTH)
    kv_heads = tl.num_programs(0) // GROUP
    start = (row.to(tl.int64) * kv_heads + head // GROUP) * num_parts * GROUP + head % GROUP
    best = -1.0e30
    total = 0.0
    if HAS_SINKS:
        best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    mixed = tl.zeros((VALUE_WIDTH,), tl.float32)
    for first in range(0, count, JOINED):
        some = first + tl.arange(0, JOINED)
        at = start + some * GROUP
        sizes = tl.load(parts_max + at, mask=some < count, other=-1.0e30)
        new_best = tl.maximum(best, tl.max(sizes, 0))
        weights = tl.exp2(sizes - new_best)
        some_parts = tl.load(
            parts + at[:, None] * VALUE_DIM + dims[None, :],
            mask=(some < count)[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        shrink = tl.exp2(best - new_best)
        mixed = mixed * shrink + tl.sum(some_parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        best = new_best
    at_out = (row.to(tl.int64) * tl.num_programs(0) + head) * VALUE_DIM + dims
    tl.store(out + at_out, (mixed / total).to(out.dtype.element_ty), mask=dims < VALUE_DIM)
