"""What a layer does between its products, one kernel each: norms, the gate, rotary positions, cache write.

Each reads its inputs once and rounds once, at the end. Kernels in Triton. Knows tensors; knows no step and
no model. Import it only where it runs: Triton comes with torch's CUDA builds alone.
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

from megallm.core_async.device.kv_cache import LayerCache
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
    _norm_rows[(len(flat),)](
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
    _norm_rows[(len(rows),)](
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
    _gate_rows[(triton.cdiv(width, GATE_WIDTH), len(rows))](
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
) -> None:
    """Turns `query` in place, and writes the turned key and the value of each token into its slot.

    `query` is `[tokens, kv_heads, heads per kv head, head_dim]`, `key` and `value` `[tokens, kv_heads,
    ..]`, strided but for the last dimension. Without cosines nothing turns.
    """
    count, kv_heads, group, head_dim = query.shape
    keys, values = cache.flat_keys, cache.flat_values
    turns = cosines is not None and sines is not None
    rotary_dim = cosines.shape[-1] if cosines is not None else 0
    tokens, num_warps = _tokens_for(count)
    _turn_and_write[(triton.cdiv(count, tokens), kv_heads)](
        query,
        key,
        value,
        key if cosines is None else cosines,
        key if sines is None else sines,
        slots,
        keys,
        values,
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
        DIM_WIDTH=triton.next_power_of_2(head_dim),
        VALUE_DIM=value.shape[-1],
        VALUE_WIDTH=triton.next_power_of_2(value.shape[-1]),
        ROTARY_DIM=rotary_dim,
        HALF_WIDTH=triton.next_power_of_2(max(1, rotary_dim // 2)),
        TURNS=turns,
        IS_INTERLEAVED=is_interleaved,
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
def _turned(a, b, table, cosines, sines, first, second, mask):
    """Turns the pairs (a, b) of some vectors by the angles at `table`."""
    first_cos = tl.load(cosines + table + first, mask=mask, other=0.0).to(tl.float32)
    first_sin = tl.load(sines + table + first, mask=mask, other=0.0).to(tl.float32)
    second_cos = tl.load(cosines + table + second, mask=mask, other=0.0).to(tl.float32)
    second_sin = tl.load(sines + table + second, mask=mask, other=0.0).to(tl.float32)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * first_cos - b * first_sin, b * second_cos + a * second_sin


@triton.jit(do_not_specialize=["count"])
def _turn_and_write(
    query, key, value, cosines, sines, slots, keys, values, count, query_row, query_kv_head, query_head,
    key_row, key_head, value_row, value_head, keys_slot, keys_head, values_slot, values_head,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HALF_WIDTH: tl.constexpr, TURNS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    kv_head = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = (tokens < count)[:, None]
    slot = tl.load(slots + tokens, mask=tokens < count, other=0).to(tl.int64)
    tokens = tokens.to(tl.int64)
    from_key = key + (tokens * key_row + kv_head * key_head)[:, None]
    to_key = keys + (slot * keys_slot + kv_head * keys_head)[:, None]
    # everything is loaded before anything is stored: no load waits for a store
    value_dims = tl.arange(0, VALUE_WIDTH)[None, :]
    is_value = is_token & (value_dims < VALUE_DIM)
    from_value = value + (tokens * value_row + kv_head * value_head)[:, None] + value_dims
    to_value = values + (slot * values_slot + kv_head * values_head)[:, None] + value_dims
    some_values = tl.load(from_value, mask=is_value)
    dims = tl.arange(0, DIM_WIDTH)[None, :]
    is_passed = is_token & (dims >= ROTARY_DIM) & (dims < DIM)
    if ROTARY_DIM < DIM:
        passed = tl.load(from_key + dims, mask=is_passed)
    if TURNS:
        pairs = tl.arange(0, HALF_WIDTH)[None, :]
        is_pair = is_token & (pairs < ROTARY_DIM // 2)
        if IS_INTERLEAVED:
            first, second = pairs * 2, pairs * 2 + 1
        else:
            first, second = pairs, pairs + ROTARY_DIM // 2
        lines = tl.arange(0, TOKENS * GROUP_WIDTH)
        line_token, head = tl.program_id(0) * TOKENS + lines // GROUP_WIDTH, lines % GROUP_WIDTH
        is_line = ((line_token < count) & (head < GROUP))[:, None] & (pairs < ROTARY_DIM // 2)
        line_token = line_token.to(tl.int64)
        line = query + (line_token * query_row + kv_head * query_kv_head + head * query_head)[:, None]
        key_a = tl.load(from_key + first, mask=is_pair, other=0.0)
        key_b = tl.load(from_key + second, mask=is_pair, other=0.0)
        query_a = tl.load(line + first, mask=is_line, other=0.0)
        query_b = tl.load(line + second, mask=is_line, other=0.0)
        key_a, key_b = _turned(
            key_a, key_b, (tokens * ROTARY_DIM)[:, None], cosines, sines, first, second, is_pair
        )
        query_a, query_b = _turned(
            query_a, query_b, (line_token * ROTARY_DIM)[:, None], cosines, sines, first, second, is_line
        )
        tl.store(to_key + first, key_a.to(keys.dtype.element_ty), mask=is_pair)
        tl.store(to_key + second, key_b.to(keys.dtype.element_ty), mask=is_pair)
        tl.store(line + first, query_a.to(query.dtype.element_ty), mask=is_line)
        tl.store(line + second, query_b.to(query.dtype.element_ty), mask=is_line)
    if ROTARY_DIM < DIM:
        tl.store(to_key + dims, passed, mask=is_passed)
    tl.store(to_value, some_values, mask=is_value)
