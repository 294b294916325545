"""Joins the parts of a decode row's keys in their order, as the attention kernel does it in one program.

Kernels in Triton. Knows tensors; knows no step. Import it only where it runs.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# (what a kernel's parameters are is Triton's own matter)

import triton
import triton.language as tl
from torch import Tensor

from megallm.core_async.device.attention import PagedLayer
from megallm.core_async.device.triton_compile import launch

JOINED = 8
"""Parts that are loaded at a time."""


def join_parts(
    layer: PagedLayer, parts: Tensor, parts_best: Tensor, kv_lengths: Tensor, *, part: int, out: Tensor
) -> None:
    """Joins the parts, of `part` keys each by position, that decode rows' programs left.

    `parts` is `[rows, heads, parts at most, value_head_dim]`, flat but for the last; `parts_best`, `[.., 2]`,
    has the largest score of each, and its sum of weights.
    """
    shape = layer.shape
    launch(
        _join,
        (shape.num_heads, len(kv_lengths)),
        parts,
        parts_best,
        kv_lengths,
        out if layer.sinks is None else layer.sinks,
        out,
        len(parts) // (len(kv_lengths) * shape.num_heads),
        VALUE_DIM=shape.value_head_dim,
        VALUE_WIDTH=triton.next_power_of_2(shape.value_head_dim),
        PART=part,
        WINDOW=-1 if shape.window is None else shape.window,
        HAS_SINKS=layer.sinks is not None,
        JOINED=JOINED,
        num_warps=1,
        # as the attention kernel
        enable_fp_fusion=False,
    )


@triton.jit
def joined(best, total, part_best, part_total):
    """Gives the best and the total of two parts, and by what the sums of each are to be multiplied."""
    new_best = tl.maximum(best, part_best)
    shrink, part_shrink = tl.exp2(best - new_best), tl.exp2(part_best - new_best)
    return new_best, total * shrink + part_total * part_shrink, shrink, part_shrink


@triton.jit(do_not_specialize=["max_parts"])
def _join(
    parts, parts_best, kv_lengths, sinks, out, max_parts, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PART: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lengths + row)
    if length == 0:
        return
    first_part = 0
    if WINDOW >= 0:
        first_part = tl.maximum(length - 1 - WINDOW, 0) // PART
    count = tl.cdiv(length, PART) - first_part
    dims = tl.arange(0, VALUE_WIDTH)
    at_head = row.to(tl.int64) * tl.num_programs(0) + head
    best, total = -1.0e30, 0.0
    whole = tl.zeros((VALUE_WIDTH,), tl.float32)
    for first in range(0, count, JOINED):
        for place in tl.static_range(JOINED):
            is_part = first + place < count
            at = at_head * max_parts + first + place
            part_best = tl.load(parts_best + at * 2, mask=is_part, other=-1.0e30)
            part_total = tl.load(parts_best + at * 2 + 1, mask=is_part, other=0.0)
            mixed = tl.load(parts + at * VALUE_DIM + dims, mask=is_part & (dims < VALUE_DIM), other=0.0)
            best, total, shrink, part_shrink = joined(best, total, part_best, part_total)
            whole = whole * shrink + mixed * part_shrink
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        best, total, shrink, _ = joined(best, total, sink, 1.0)
        whole = whole * shrink
    whole = whole / total
    tl.store(out + at_head * VALUE_DIM + dims, whole.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
