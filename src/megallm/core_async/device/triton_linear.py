"""Linear layers of few rows: the weights stream through once, by many programs, each a band of outputs.

A product of few rows costs what reading its weights costs, and a library's kernels read them at a third of
the card's speed where a layer is small. The gate is
part of its product here, and the parts of a split product are summed by the norm that follows it
(`add_rms_norm_of_parts`).
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


class Tiling(Struct, frozen=True):
    """How a product is cut into programs."""

    outputs: int
    """Outputs of one program."""
    depth: int
    """Inputs that a program takes at a time."""
    parts: int
    """Programs that share an output, each with a part of the inputs."""
    num_warps: int
    num_stages: int


def few_rows(
    rows: Tensor, weight: Tensor, tiling: Tiling, *, is_gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """Gives `rows @ weight.T`, or its gate: SiLU of the first half of each row, times the second half.

    With several parts the result is `[parts, rows, outputs]` in float32, to be summed; else it is of
    `rows`' dtype.
    """
    count, depth = rows.shape
    outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    if out is None:
        parts_shape = (tiling.parts,) if tiling.parts > 1 else ()
        out = torch.empty(
            (*parts_shape, count, outputs),
            dtype=torch.float32 if tiling.parts > 1 else rows.dtype,
            device=rows.device,
        )
    launch(
        _few_rows,
        (triton.cdiv(outputs, tiling.outputs), tiling.parts),
        rows,
        weight,
        out,
        count,
        outputs,
        depth,
        rows.stride(0),
        weight.stride(0),
        ROWS=1 if count == 1 else max(16, triton.next_power_of_2(count)),
        OUTPUTS=tiling.outputs,
        DEPTH=tiling.depth,
        IS_GATED=is_gated,
        IS_EVEN=depth % (tiling.depth * tiling.parts) == 0 and outputs % tiling.outputs == 0,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **chained(rows),
    )
    return out


def add_rms_norm_of_parts(
    parts: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Gives `parts.sum(0) + residual` and its norm; `parts` is `[parts, rows, width]`, float32."""
    num_parts, count, width = parts.shape
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    launch(
        _add_parts_and_norm,
        (count,),
        parts,
        residual,
        weight,
        total,
        normed,
        residual.stride(0),
        count,
        epsilon,
        PARTS=num_parts,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=4 if width < 4096 else 8,  # noqa: PLR2004 - a row's share of a thread
        **chained(residual),
    )
    return total, normed


@triton.jit
def _tile(weight, places, is_output, inputs, end, weight_stride, IS_EVEN: tl.constexpr):
    """Gives a band's weights for some inputs."""
    at = weight + places[:, None].to(tl.int64) * weight_stride + inputs[None, :]
    if IS_EVEN:
        return tl.load(at)
    return tl.load(at, mask=is_output[:, None] & (inputs < end)[None, :], other=0.0)


@triton.jit
def _one_line(rows, weight, tile, places, is_output, begin, end, weight_stride,
              OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Gives the products of one row with a band, whose first tile is there already."""
    sums = tl.zeros((OUTPUTS, DEPTH), tl.float32)
    for first in range(begin, end, DEPTH):
        inputs = first + tl.arange(0, DEPTH)
        # the last of these is empty: nothing is read past the end
        following = _tile(weight, places, is_output, inputs + DEPTH, end, weight_stride, False)
        line = tl.load(rows + inputs, mask=inputs < end, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * line[None, :]
        tile = following
    return tl.sum(sums, 1)


@triton.jit
def _some_lines(
    rows, weight, places, is_output, lines, is_line, begin, end, row_stride, weight_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Gives the products of some rows with a band, `[OUTPUTS, ROWS]`."""
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(begin, end, DEPTH):
        inputs = first + tl.arange(0, DEPTH)
        tile = _tile(weight, places, is_output, inputs, end, weight_stride, IS_EVEN)
        some = tl.load(
            rows + lines[None, :] * row_stride + inputs[:, None],
            mask=is_line[None, :] & (inputs < end)[:, None],
            other=0.0,
        )
        sums = tl.dot(tile, some, sums)
    return sums


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    rows, weight, out, count, outputs, depth, row_stride, weight_stride, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = places < outputs
    lines = tl.arange(0, ROWS)
    is_line = lines < count
    size = tl.cdiv(tl.cdiv(depth, tl.num_programs(1)), DEPTH) * DEPTH
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, depth)
    upper = weight + outputs.to(tl.int64) * weight_stride
    part = out + tl.program_id(1).to(tl.int64) * count * outputs
    if ROWS == 1:
        # weights are nobody's output: the first are read before the kernel ahead has ended
        inputs = begin + tl.arange(0, DEPTH)
        tile = _tile(weight, places, is_output, inputs, end, weight_stride, IS_EVEN)
        if IS_GATED:
            upper_tile = _tile(upper, places, is_output, inputs, end, weight_stride, IS_EVEN)
        follow(CHAINED)
        sums = _one_line(rows, weight, tile, places, is_output, begin, end, weight_stride, OUTPUTS, DEPTH)
        if IS_GATED:
            ups = _one_line(
                rows, upper, upper_tile, places, is_output, begin, end, weight_stride, OUTPUTS, DEPTH
            )
            sums = sums / (1.0 + tl.exp(-sums)) * ups
        tl.store(part + places, sums.to(out.dtype.element_ty), mask=is_output)
    else:
        follow(CHAINED)
        sums = _some_lines(rows, weight, places, is_output, lines, is_line, begin, end, row_stride,
                           weight_stride, ROWS, OUTPUTS, DEPTH, IS_EVEN)  # fmt: skip
        if IS_GATED:
            ups = _some_lines(rows, upper, places, is_output, lines, is_line, begin, end, row_stride,
                              weight_stride, ROWS, OUTPUTS, DEPTH, IS_EVEN)  # fmt: skip
            sums = sums / (1.0 + tl.exp(-sums)) * ups
        tl.store(
            part + lines[None, :] * outputs + places[:, None],
            sums.to(out.dtype.element_ty),
            mask=is_output[:, None] & is_line[None, :],
        )


@triton.jit(do_not_specialize=["count"])
def _add_parts_and_norm(
    parts, residual, weight, total, normed, residual_stride, count, epsilon, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    mask = dims < WIDTH
    x = tl.load(residual + row * residual_stride + dims, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(parts + (part * count + row) * WIDTH + dims, mask=mask, other=0.0)
    # the sum is what the next layers see, so the norm is of the rounded one
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + dims, rounded, mask=mask)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    weights = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + dims, (x * scale * weights).to(normed.dtype.element_ty), mask=mask)
