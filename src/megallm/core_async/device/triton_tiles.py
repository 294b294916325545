"""Linear layers of many rows: tiles of the product, their inputs brought by the card's copy engine.

A program makes one tile, or one after the other, of `rows @ weight.T`; the gate is part of its product here,
and the parts of a split product are summed by the norm that follows it (`add_rms_norm_of_parts`). Tiles
below each other come together, as in "Triton: an intermediate language and compiler for tiled neural
network computations" (Tillet, Kung and Cox, 2019). `tile_choice` says where this beats cuBLAS.

Kernels in Triton. Knows tensors; knows no step and no model. Import it only where it runs: Triton comes
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
from triton.tools.tensor_descriptor import TensorDescriptor

from megallm.core_async.device.tile_choice import Tiles
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_launch import chained, follow, has_large_tiles

_ALIGNMENT = 16
"""Bytes that the copy engine's rows begin at multiples of."""


def can_tile(rows: Tensor, weight: Tensor) -> bool:
    """Says whether the copy engine can bring both, to where there is room for its tiles."""
    return (
        rows.dtype is weight.dtype
        and rows.dtype in (torch.bfloat16, torch.float16)
        and (rows.device.type != "cuda" or has_large_tiles(rows.device))
        and all(map(_is_aligned, (rows, weight)))
    )


def can_store(outputs: int, dtype: torch.dtype, tiles: Tiles) -> bool:
    """Says whether it can store a product's rows as well, which in parts are stored without it."""
    return tiles.parts > 1 or outputs * dtype.itemsize % _ALIGNMENT == 0


def tiled_product(rows: Tensor, weight: Tensor, tiles: Tiles, *, is_gated: bool = False) -> Tensor:
    """Gives `rows @ weight.T`, or its gate: SiLU of the first half of each row, times the second half.

    `rows` is `[rows, inputs]`, `weight` `[outputs, inputs]`, both as `can_tile` wants them. With several
    parts the result is `[parts, rows, outputs]` in float32, to be summed; else it is of `rows`' dtype.
    """
    count, depth = rows.shape
    outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    if tiles.parts > 1:
        out = target = torch.empty((tiles.parts, count, outputs), dtype=torch.float32, device=rows.device)
    else:
        out = torch.empty((count, outputs), dtype=rows.dtype, device=rows.device)
        target = TensorDescriptor.from_tensor(out, [tiles.rows, tiles.outputs])
    num_tiles = tiles.num_tiles(count, outputs)
    launch(
        _tiled_product,
        (min(num_tiles, tiles.max_programs or num_tiles), tiles.parts),
        TensorDescriptor.from_tensor(rows, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(weight, [tiles.outputs, tiles.depth]),
        target,
        count,
        outputs,
        depth,
        ROWS=tiles.rows,
        OUTPUTS=tiles.outputs,
        DEPTH=tiles.depth,
        PARTS=tiles.parts,
        GROUP=tiles.group,
        IS_GATED=is_gated,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **chained(rows),
    )
    return out


def _is_aligned(tensor: Tensor) -> bool:
    row_bytes = tensor.stride(0) * tensor.itemsize
    return tensor.stride(-1) == 1 and row_bytes % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0


@triton.jit
def _place(tile, row_tiles, output_tiles, GROUP: tl.constexpr):
    """Gives where a tile is: a group's tiles go down first, then to the right."""
    per_group = GROUP * output_tiles
    first = tile // per_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + tile % per_group % height, tile % per_group // height


@triton.jit(do_not_specialize=["count"])
def _tiled_product(
    rows, weight, out, count, outputs, depth, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row_tiles, output_tiles = tl.cdiv(count, ROWS), tl.cdiv(outputs, OUTPUTS)
    part = tl.program_id(1)
    size = tl.cdiv(tl.cdiv(depth, PARTS), DEPTH) * DEPTH
    begin = part * size
    end = tl.minimum(begin + size, depth)
    follow(CHAINED)
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        down, right = _place(tile, row_tiles, output_tiles, GROUP)
        first_row, first_output = down * ROWS, right * OUTPUTS
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        ups = tl.zeros((ROWS, OUTPUTS), tl.float32)
        # past the end of rows, outputs and inputs the copy engine gives zeros, and stores nothing
        for first in range(begin, end, DEPTH):
            some = rows.load([first_row, first])
            sums = tl.dot(some, weight.load([first_output, first]).T, sums)
            if IS_GATED:
                ups = tl.dot(some, weight.load([outputs + first_output, first]).T, ups)
        if IS_GATED:
            sums = sums / (1.0 + tl.exp(-sums)) * ups
        if PARTS > 1:
            lines, places = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, OUTPUTS)
            at = (part * count + lines).to(tl.int64)[:, None] * outputs + places[None, :]
            tl.store(out + at, sums, mask=(lines < count)[:, None] & (places < outputs)[None, :])
        else:
            out.store([first_row, first_output], sums.to(out.dtype))
