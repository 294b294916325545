"""Linear layers whose every output is the same to the bit, whatever rows are computed beside its own.

A library takes another kernel, and another order of summing, for another number of rows. Here an output is
always one chain of the same tensor-core instruction over its inputs in order: how a product is cut into
tiles says which program computes an output, never in what order. Inputs are never split, so that few rows
take narrow bands of outputs instead, and many programs read the weights all the same.
Kernels in Triton. Knows tensors; knows no step and no model. Import it only where it runs.
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

from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_launch import chained, follow

_GROUPED = 8
"""Row tiles whose programs run one after the other, so that they find the weights in the cache."""


class InvariantTiling(Struct, frozen=True):
    """How a product is cut into programs: changes what it costs, and no bit of it."""

    rows: int
    outputs: int
    depth: int
    """Inputs that a program takes at a time."""
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """The weights, and not the rows, are the instruction's first operand, which has 64 lines at least."""


_FEW = (
    InvariantTiling(rows=16, outputs=128, depth=128, num_warps=4, num_stages=4, is_swapped=True),
    InvariantTiling(rows=16, outputs=64, depth=128, num_warps=4, num_stages=6, is_swapped=True),
)
_MANY = (
    InvariantTiling(rows=256, outputs=128, depth=64, num_warps=8, num_stages=3, is_swapped=True),
    InvariantTiling(rows=128, outputs=128, depth=64, num_warps=8, num_stages=4),
    InvariantTiling(rows=128, outputs=64, depth=64, num_warps=4, num_stages=4),
    InvariantTiling(rows=64, outputs=128, depth=64, num_warps=4, num_stages=4, is_swapped=True),
    InvariantTiling(rows=64, outputs=64, depth=128, num_warps=4, num_stages=4, is_swapped=True),
    InvariantTiling(rows=32, outputs=64, depth=128, num_warps=4, num_stages=5, is_swapped=True),
)
"""From the one that reads least to the one that makes most programs."""
_PROGRAMS = 90
"""Programs that are worth more than larger tiles."""
_WIDE = 16_384
"""Outputs from which on few rows take wider bands."""


def tiling_for(count: int, outputs: int) -> InvariantTiling:
    """Gives how to cut a product of `count` rows: what was fastest on an H200, or near it."""
    if count <= _FEW[0].rows:
        return _FEW[0] if outputs >= _WIDE else _FEW[1]
    for tiling in _MANY:
        programs = triton.cdiv(count, tiling.rows) * triton.cdiv(outputs, tiling.outputs)
        if tiling.rows < 2 * count and programs >= _PROGRAMS:
            return tiling
    return _MANY[-1]


def product(
    rows: Tensor, weight: Tensor, tiling: InvariantTiling | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Gives `rows @ weight.T` in the dtype of `rows`, `[rows, outputs]`; in `out` where that is given."""
    count, depth = rows.shape
    outputs = len(weight)
    if tiling is None:
        tiling = tiling_for(count, outputs)
    if out is None:
        out = torch.empty((count, outputs), dtype=rows.dtype, device=rows.device)
    if not count:
        return out
    launch(
        _product,
        (triton.cdiv(count, tiling.rows) * triton.cdiv(outputs, tiling.outputs),),
        rows,
        weight,
        out,
        count,
        outputs,
        depth,
        rows.stride(0),
        weight.stride(0),
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        DEPTH=tiling.depth,
        GROUPED=_GROUPED,
        IS_SWAPPED=tiling.is_swapped,
        IS_EVEN=outputs % tiling.outputs == 0 and depth % tiling.depth == 0,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **chained(rows),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _product(
    rows, weight, out, count, outputs, depth, row_stride, weight_stride, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GROUPED: tl.constexpr, IS_SWAPPED: tl.constexpr,
    IS_EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    # programs of a group share their weights: all its row tiles for one band, then for the next
    row_tiles, bands = tl.cdiv(count, ROWS), tl.cdiv(outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUPED * bands)
    group_rows = tl.minimum(row_tiles - group * GROUPED, GROUPED)
    place = tl.program_id(0) % (GROUPED * bands)
    lines = (group * GROUPED + place % group_rows) * ROWS + tl.arange(0, ROWS)
    places = place // group_rows * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, DEPTH)
    is_line, is_output = lines < count, places < outputs
    some_rows = rows + lines.to(tl.int64)[:, None] * row_stride + inputs[None, :]
    some_weights = weight + places.to(tl.int64)[:, None] * weight_stride + inputs[None, :]
    if IS_SWAPPED:  # noqa: SIM108 - the compiler takes one branch alone
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, depth, DEPTH):
        if IS_EVEN:
            line = tl.load(some_rows + first, mask=is_line[:, None], other=0.0)
            band = tl.load(some_weights + first)
        else:
            is_input = (inputs + first < depth)[None, :]
            line = tl.load(some_rows + first, mask=is_line[:, None] & is_input, other=0.0)
            band = tl.load(some_weights + first, mask=is_output[:, None] & is_input, other=0.0)
        if IS_SWAPPED:  # noqa: SIM108 - the same
            sums = tl.dot(band, tl.trans(line), sums)
        else:
            sums = tl.dot(line, tl.trans(band), sums)
    if IS_SWAPPED:
        sums = tl.trans(sums)
    at = lines.to(tl.int64)[:, None] * outputs + places[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_line[:, None] & is_output[None, :])
