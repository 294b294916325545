"""Heads as an attention kernel norms and turns them itself: all dimensions beside each other.

Rounded as `triton_layer.turn_and_write` rounds: after the norm, and after the turn. A dimension is turned
with its partner, which is loaded a second time, from where that lies.

Functions of Triton kernels. Knows tensors; knows no attention and no step. Import it only where it runs:
Triton comes with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (what a kernel's parameters are is Triton's own matter)

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.attention import HeadNorms


class NewTokens(Struct, frozen=True, eq=False):
    """What a step's tokens bring: keys and values as projected, angles, and slots that nothing is in yet."""

    key: Tensor
    """`[tokens, kv_heads, head_dim]`, strided but for the last dimension."""
    value: Tensor
    """`[tokens, kv_heads, value_head_dim]`, likewise."""
    cosines: Tensor | None
    """`[tokens, rotary_dim]`, both of a pair given; None where nothing turns."""
    sines: Tensor | None
    slots: Tensor
    """`[tokens]`."""
    is_interleaved: bool
    norms: HeadNorms | None = None


def arguments_of(new: NewTokens | None, query: Tensor) -> dict[str, Tensor | float | bool]:
    """Gives what a kernel takes and is compiled for; what it does not need is `query`, or zero."""
    norms = None if new is None else new.norms
    query_norm, key_norm = (None, None) if norms is None else (norms.query, norms.key)
    key, value = (query, query) if new is None else (new.key, new.value)
    cosines, sines = (None, None) if new is None else (new.cosines, new.sines)
    return {
        "new_keys": key,
        "new_values": value,
        "cosines": query if cosines is None else cosines,
        "sines": query if sines is None else sines,
        "query_weight": query if query_norm is None else query_norm.weight,
        "key_weight": query if key_norm is None else key_norm.weight,
        "slots": query if new is None else new.slots,
        "query_epsilon": 0.0 if query_norm is None else query_norm.epsilon,
        "key_epsilon": 0.0 if key_norm is None else key_norm.epsilon,
        "new_key_row": key.stride(0),
        "new_key_head": key.stride(1),
        "new_value_row": value.stride(0),
        "new_value_head": value.stride(1),
        "TAKES_NEW": new is not None,
        "ROTARY_DIM": 0 if cosines is None else cosines.shape[-1],
        "IS_INTERLEAVED": new is not None and new.is_interleaved,
        "NORMS_QUERY": query_norm is not None,
        "NORMS_KEY": key_norm is not None,
    }


@triton.jit
def with_partners(start, dims, mask, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Loads heads, or weights, and what each dimension turns with: zero where it does not turn."""
    own = tl.load(start + dims, mask=mask, other=0.0)
    other = 0.0
    if ROTARY_DIM > 0:
        partner = dims ^ 1 if IS_INTERLEAVED else (dims + ROTARY_DIM // 2) % ROTARY_DIM
        other = tl.load(start + partner, mask=mask & (dims < ROTARY_DIM), other=0.0)
    return own, other


@triton.jit
def angles_of(cosines, sines, dims, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Loads the factors of each dimension and of its partner; those of what does not turn leave it."""
    cosine = 1.0
    sine = 0.0
    if ROTARY_DIM > 0:
        is_turning = dims < ROTARY_DIM
        cosine = tl.load(cosines + dims, mask=is_turning, other=1.0).to(tl.float32)
        sine = tl.load(sines + dims, mask=is_turning, other=0.0).to(tl.float32)
        is_first = dims % 2 == 0 if IS_INTERLEAVED else dims < ROTARY_DIM // 2
        sine = tl.where(is_first, -sine, sine)
    return cosine, sine


@triton.jit
def normed(heads, weights, epsilon, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Gives heads over their root mean square, times the weights, rounded; all as `with_partners` does."""
    own, other = heads
    own_weight, other_weight = weights
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + epsilon)[:, None]
    if ROTARY_DIM > 0:
        other = (other.to(tl.float32) * scale * other_weight.to(tl.float32)).to(own.dtype)
    own = (wide * scale * own_weight.to(tl.float32)).to(own.dtype)
    return own, other


@triton.jit
def turned(heads, angles, ROTARY_DIM: tl.constexpr):
    """Gives heads turned, rounded to their dtype."""
    own, other = heads
    cosine, sine = angles
    if ROTARY_DIM > 0:
        own = (own.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(own.dtype)
    return own


@triton.jit
def rules_of(
    cosines, sines, query_weight, key_weight, row, dims, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, NORMS_QUERY: tl.constexpr, NORMS_KEY: tl.constexpr,
):  # fmt: skip
    """Loads a row's angles and the norms' weights: nothing that a kernel just ahead writes."""
    angles = angles_of(cosines + row * ROTARY_DIM, sines + row * ROTARY_DIM, dims, ROTARY_DIM, IS_INTERLEAVED)
    query_weights = (0.0, 0.0)
    key_weights = (0.0, 0.0)
    if NORMS_QUERY:
        query_weights = with_partners(query_weight, dims, dims < DIM, ROTARY_DIM, IS_INTERLEAVED)
    if NORMS_KEY:
        key_weights = with_partners(key_weight, dims, dims < DIM, ROTARY_DIM, IS_INTERLEAVED)
    return angles, query_weights, key_weights


@triton.jit
def take_new(
    query, key, value, to_key, to_value, rules, heads, dims, value_dims, is_newest, query_head,
    query_epsilon, key_epsilon, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, NORMS_QUERY: tl.constexpr,
    NORMS_KEY: tl.constexpr,
):  # fmt: skip
    """Gives the query heads and the key of a token's kv head, normed and turned, and its value.

    The key stands beside each query head: so its sums stay in the threads that have the head's. Key and value
    are stored where `is_newest`, else they are zero.
    """
    angles, query_weights, key_weights = rules
    is_dim, is_value = dims < DIM, (value_dims < VALUE_DIM) & is_newest
    # everything is loaded before anything is stored or summed: no load waits for either
    queries = with_partners(
        query + heads * query_head, dims, is_dim & (heads < GROUP), ROTARY_DIM, IS_INTERLEAVED
    )
    keys = with_partners(key, dims, is_dim & is_newest, ROTARY_DIM, IS_INTERLEAVED)
    new_value = tl.load(value + value_dims, mask=is_value, other=0.0)
    tl.store(to_value + value_dims, new_value, mask=is_value)
    if NORMS_QUERY:
        queries = normed(queries, query_weights, query_epsilon, DIM, ROTARY_DIM)
    if NORMS_KEY:
        keys = normed(keys, key_weights, key_epsilon, DIM, ROTARY_DIM)
    new_key = turned(keys, angles, ROTARY_DIM)
    tl.store(to_key + dims, new_key, mask=is_dim & is_newest & (heads == 0))
    return turned(queries, angles, ROTARY_DIM), new_key, new_value


@triton.jit
def spread(heads, ROWS: tl.constexpr):
    """Gives heads, `[heads]` or `[heads, width]`, one after the other again and again: so many rows.

    Gathered, they lie as loaded ones do, which a product takes from shared memory. Broadcast and reshaped, it
    would keep them in registers: two programs of wide heads would fit where three do.
    """
    if heads.shape[0] < ROWS:
        index = tl.arange(0, ROWS) % heads.shape[0]
        if len(heads.shape) > 1:
            index = tl.broadcast_to(index[:, None], (ROWS, heads.shape[1]))
        heads = tl.gather(heads, index, 0)
    return heads
