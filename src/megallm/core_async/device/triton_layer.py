"""What a layer does between its products, one kernel each: norms, the gate, rotary positions, cache write.

Each reads its inputs once and rounds once, at the end; what is normed before it turns, between the two as
well. Kernels in Triton. Knows tensors; knows no step and no model. Import it only where it runs: Triton
comes with torch's CUDA builds alone.
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

from megallm.core_async.device.attention import HeadNorms
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_launch import chained, follow

GATE_WIDTH = 1024
"""Dimensions that one program of the gate takes."""
FEW_WARPS, MANY_WARPS = 4, 8
FEW_TOKENS, SOME_TOKENS = 32, 1024
"""Up to so many tokens a program turns one, or two."""
WIDE = 2048
"""From this row width on a norm takes more warps."""


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Gives each row over its root mean square, times `weight`; over the last dimension, of any number."""
    width = rows.shape[-1]
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    flat = rows.reshape(-1, width)
    launch(
        _norm_rows,
        (len(flat),),
        flat,
        flat,
        weight,
        out,
        flat.stride(0),
        0,
        epsilon,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADDS=False,
        num_warps=_warps_for(width),
        **chained(rows),
    )
    return out


def add_rms_norm(rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gives `rows + residual`, in the place of `rows`, and its norm; both are `[rows, width]`."""
    width = rows.shape[-1]
    out = torch.empty_like(rows)
    launch(
        _norm_rows,
        (len(rows),),
        rows,
        residual,
        weight,
        out,
        rows.stride(0),
        residual.stride(0),
        epsilon,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADDS=True,
        num_warps=_warps_for(width),
        **chained(rows),
    )
    return rows, out


def silu_gate(rows: Tensor) -> Tensor:
    """Gives SiLU of the first half of each row, times the second half; `[rows, 2 * width]`."""
    width = rows.shape[-1] // 2
    out = torch.empty((len(rows), width), dtype=rows.dtype, device=rows.device)
    launch(
        _gate_rows,
        (triton.cdiv(width, GATE_WIDTH), len(rows)),
        rows,
        out,
        rows.stride(0),
        width,
        GATE_WIDTH=GATE_WIDTH,
        num_warps=FEW_WARPS,
        **chained(rows),
    )
    return out


def turn_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor | None,
    sines: Tensor | None,
    slots: Tensor,
    cache: LayerCache,
    *,
    is_interleaved: bool,
    norms: HeadNorms | None = None,
) -> None:
    """Norms and turns `query` in place, and writes each token's key, likewise, and value into its slot.

    `query` is `[tokens, kv_heads, heads per kv head, head_dim]`, `key` and `value` `[tokens, kv_heads,
    ..]`, strided but for the last dimension. Without cosines nothing turns. What is normed is rounded
    before it turns, as by a kernel of its own.
    """
    count, kv_heads, group, head_dim = query.shape
    keys, values = cache.flat_keys, cache.flat_values
    rotary_dim = cosines.shape[-1] if cosines is not None else 0
    query_norm, key_norm = (None, None) if norms is None else (norms.query, norms.key)
    tokens, num_warps = _tokens_for(count)
    launch(
        _turn_and_write,
        (triton.cdiv(count, tokens), kv_heads),
        query,
        key,
        value,
        key if cosines is None else cosines,
        key if sines is None else sines,
        query if query_norm is None else query_norm.weight,
        key if key_norm is None else key_norm.weight,
        slots,
        keys,
        values,
        0.0 if query_norm is None else query_norm.epsilon,
        0.0 if key_norm is None else key_norm.epsilon,
        count,
        *query.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        TOKENS=tokens,
        GROUP=group,
        GROUP_WIDTH=triton.next_power_of_2(group),
        DIM=head_dim,
        VALUE_DIM=value.shape[-1],
        VALUE_WIDTH=triton.next_power_of_2(value.shape[-1]),
        ROTARY_DIM=rotary_dim,
        HALF_WIDTH=triton.next_power_of_2(max(1, rotary_dim // 2)),
        REST_WIDTH=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        TURNS=cosines is not None and sines is not None,
        IS_INTERLEAVED=is_interleaved,
        NORMS_QUERY=query_norm is not None,
        NORMS_KEY=key_norm is not None,
        num_warps=num_warps,
        **chained(query),
    )


def _tokens_for(count: int) -> tuple[int, int]:
    """Gives how many tokens a program turns, and its warps: few tokens are spread over the card."""
    if count <= FEW_TOKENS:
        return 1, 1
    return (2, 1) if count <= SOME_TOKENS else (8, 4)


def _warps_for(width: int) -> int:
    return MANY_WARPS if width >= WIDE else 1 if width <= 256 else FEW_WARPS  # noqa: PLR2004 - a head's norm


@triton.jit
def _norm_rows(
    rows, residual, weight, out, row_stride, residual_stride, epsilon, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ADDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    mask = dims < WIDTH
    x = tl.load(rows + row * row_stride + dims, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual + row * residual_stride + dims, mask=mask, other=0.0).to(tl.float32)
        # the sum is what the next layers see, so the norm is of the rounded one
        rounded = x.to(rows.dtype.element_ty)
        tl.store(rows + row * row_stride + dims, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    weights = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + dims, (x * scale * weights).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_rows(rows, out, row_stride, width, GATE_WIDTH: tl.constexpr, CHAINED: tl.constexpr):
    follow(CHAINED)
    row = tl.program_id(1).to(tl.int64)
    dims = tl.program_id(0) * GATE_WIDTH + tl.arange(0, GATE_WIDTH)
    mask = dims < width
    gate = tl.load(rows + row * row_stride + dims, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + row * row_stride + width + dims, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + dims, gated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _head(start, first, second, rest, is_pair, is_rest, TURNS: tl.constexpr, RESTS: tl.constexpr):
    """Loads heads as the pairs that turn and the rest that does not; of what isn't loaded, a zero."""
    a = 0.0
    b = 0.0
    passed = 0.0
    if TURNS:
        a = tl.load(start + first, mask=is_pair, other=0.0)
        b = tl.load(start + second, mask=is_pair, other=0.0)
    if RESTS:
        passed = tl.load(start + rest, mask=is_rest, other=0.0)
    return a, b, passed


@triton.jit
def _normed(head, weights, epsilon, DIM: tl.constexpr, TURNS: tl.constexpr, RESTS: tl.constexpr):
    """Gives heads over their root mean square, times the weights, rounded; all as `_head` gives them."""
    a, b, passed = head
    a_weight, b_weight, passed_weight = weights
    squares = 0.0
    if TURNS:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        squares += tl.sum(wide_a * wide_a + wide_b * wide_b, 1)
    if RESTS:
        wide = passed.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    scale = tl.rsqrt(squares / DIM + epsilon)[:, None]
    if TURNS:
        a = (wide_a * scale * a_weight.to(tl.float32)).to(a.dtype)
        b = (wide_b * scale * b_weight.to(tl.float32)).to(b.dtype)
    if RESTS:
        passed = (wide * scale * passed_weight.to(tl.float32)).to(passed.dtype)
    return a, b, passed


@triton.jit
def _angles(cosines, sines, table, first, second, mask):
    """Loads the cosines and sines at `table` of both halves of some pairs."""
    first_cos = tl.load(cosines + table + first, mask=mask, other=0.0).to(tl.float32)
    first_sin = tl.load(sines + table + first, mask=mask, other=0.0).to(tl.float32)
    second_cos = tl.load(cosines + table + second, mask=mask, other=0.0).to(tl.float32)
    second_sin = tl.load(sines + table + second, mask=mask, other=0.0).to(tl.float32)
    return first_cos, first_sin, second_cos, second_sin


@triton.jit
def _store_turned(start, head, angles, first, second, mask):
    """Turns pairs by their angles and stores them."""
    a, b, _passed = head
    first_cos, first_sin, second_cos, second_sin = angles
    a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(start + first, (a * first_cos - b * first_sin).to(start.dtype.element_ty), mask=mask)
    tl.store(start + second, (b * second_cos + a * second_sin).to(start.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _turn_and_write(
    query, key, value, cosines, sines, query_weight, key_weight, slots, keys, values, query_epsilon,
    key_epsilon, count, query_row, query_kv_head, query_head, key_row, key_head, value_row, value_head,
    keys_slot, keys_head, values_slot, values_head, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, TURNS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, NORMS_QUERY: tl.constexpr, NORMS_KEY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    RESTS: tl.constexpr = ROTARY_DIM < DIM
    kv_head = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lines = tl.arange(0, TOKENS * GROUP_WIDTH)
    line_token, head = tl.program_id(0) * TOKENS + lines // GROUP_WIDTH, lines % GROUP_WIDTH
    is_token, is_line = (tokens < count)[:, None], ((line_token < count) & (head < GROUP))[:, None]
    pairs, rest = tl.arange(0, HALF_WIDTH)[None, :], ROTARY_DIM + tl.arange(0, REST_WIDTH)[None, :]
    if IS_INTERLEAVED:
        first, second = pairs * 2, pairs * 2 + 1
    else:
        first, second = pairs, pairs + ROTARY_DIM // 2
    is_key_pair, is_key_rest = is_token & (pairs < ROTARY_DIM // 2), is_token & (rest < DIM)
    is_query_pair, is_query_rest = is_line & (pairs < ROTARY_DIM // 2), is_line & (rest < DIM)
    # no kernel of the step writes weights; a line of them for each head, since they lie as the heads do
    if NORMS_KEY:
        weight = key_weight + tl.zeros_like(tokens)[:, None]
        key_weights = _head(weight, first, second, rest, is_key_pair, is_key_rest, TURNS, RESTS)
    if NORMS_QUERY:
        weight = query_weight + tl.zeros_like(lines)[:, None]
        query_weights = _head(weight, first, second, rest, is_query_pair, is_query_rest, TURNS, RESTS)
    follow(CHAINED)
    slot = tl.load(slots + tokens, mask=tokens < count, other=0).to(tl.int64)
    tokens, line_token = tokens.to(tl.int64), line_token.to(tl.int64)
    to_key = keys + (slot * keys_slot + kv_head * keys_head)[:, None]
    # everything is loaded before anything is stored: no load waits for a store
    value_dims = tl.arange(0, VALUE_WIDTH)[None, :]
    is_value = is_token & (value_dims < VALUE_DIM)
    from_value = value + (tokens * value_row + kv_head * value_head)[:, None] + value_dims
    to_value = values + (slot * values_slot + kv_head * values_head)[:, None] + value_dims
    some_values = tl.load(from_value, mask=is_value)
    from_key = key + (tokens * key_row + kv_head * key_head)[:, None]
    some_keys = _head(from_key, first, second, rest, is_key_pair, is_key_rest, TURNS, RESTS)
    line = query + (line_token * query_row + kv_head * query_kv_head + head * query_head)[:, None]
    queries = _head(line, first, second, rest, is_query_pair, is_query_rest, TURNS, RESTS and NORMS_QUERY)
    if TURNS:
        table, line_table = (tokens * ROTARY_DIM)[:, None], (line_token * ROTARY_DIM)[:, None]
        key_angles = _angles(cosines, sines, table, first, second, is_key_pair)
        query_angles = _angles(cosines, sines, line_table, first, second, is_query_pair)
    # no load may move below a store: this one keeps the compiler from loading after the norms' sums
    tl.store(to_value, some_values, mask=is_value)
    if NORMS_KEY:
        some_keys = _normed(some_keys, key_weights, key_epsilon, DIM, TURNS, RESTS)
    if NORMS_QUERY:
        queries = _normed(queries, query_weights, query_epsilon, DIM, TURNS, RESTS)
    if TURNS:
        _store_turned(to_key, some_keys, key_angles, first, second, is_key_pair)
        _store_turned(line, queries, query_angles, first, second, is_query_pair)
    if RESTS:
        tl.store(to_key + rest, some_keys[2], mask=is_key_rest)
    if RESTS and NORMS_QUERY:
        tl.store(line + rest, queries[2], mask=is_query_rest)
