"""A layer's arithmetic on CUDA: own kernels for all that is no product, and for products where they win.

Those are products of few rows, and of more where a gate or a sum goes with them; the others are cuBLAS's.

Knows which kernel takes which product; knows no step and no model. Import it only where it runs, as the
kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from megallm.core_async.device import tile_choice, triton_layer
from megallm.core_async.device.tile_choice import Tiles
from megallm.core_async.device.triton_linear import Tiling, add_rms_norm_of_parts, few_rows
from megallm.core_async.device.triton_tiles import can_store, can_tile, tiled_product

MAX_FEW_ROWS = 32
"""Rows up to which the weights stream past all of them at once: in tiles most took 2 to 10 % longer."""
_SMALL = 2048
"""Outputs below which a product of one row can't fill the card alone, and its inputs are split."""
_PROGRAMS = 128
"""Programs that fill the card with bands of 64 outputs."""
_ENOUGH = 64
"""Programs with which a product of few rows gains on cuBLAS."""
_MAX_PARTS = 4
"""More cost more than they give."""
_LARGE = 32 * _SMALL
"""Outputs beyond which a layer is tuned as the output layers of large vocabularies."""


class TritonOps:
    """`dense_layer.LayerOps` by cuBLAS products and the Triton kernels."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is: the kernels take it so."""
        del weight
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        tiling = _whole(rows, weight, bias)
        if tiling is not None:
            few = rows.view(-1, rows.shape[-1])
            return few_rows(few, weight, tiling).view(*rows.shape[:-1], -1)
        tiles = _tiles(tile_choice.whole, rows, weight, bias)
        if tiles is not None:
            return tiled_product(rows, weight, tiles)
        return functional.linear(rows, weight, bias)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of each row's first half, times the second."""
        tiling = _gated(rows, weight, bias)
        if tiling is not None:
            return few_rows(rows, weight, tiling, is_gated=True)
        tiles = _tiles(tile_choice.gated, rows, weight, bias, halves=2)
        if tiles is not None:
            return tiled_product(rows, weight, tiles, is_gated=True)
        return triton_layer.silu_gate(functional.linear(rows, weight, bias))

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`."""
        return self.linear(rows, weight, bias).add_(residual)

    def add_linear_norm(
        self,
        residual: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        epsilon: float,
        *,
        may_overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Gives `residual + rows @ weight.T + bias` and its norm."""
        tiling = _split(rows, weight, bias)
        if tiling is not None:
            parts = few_rows(rows, weight, tiling)
            return add_rms_norm_of_parts(parts, residual, norm_weight, epsilon)
        tiles = _tiles(tile_choice.split, rows, weight, bias)
        if tiles is not None:
            parts = tiled_product(rows, weight, tiles)
            return add_rms_norm_of_parts(parts, residual, norm_weight, epsilon)
        if may_overwrite and bias is None:
            # cuBLAS adds the residual as it stores the product: the norm reads one tensor, not two
            total = residual.addmm_(rows, weight.t())
            return total, triton_layer.rms_norm(total, norm_weight, epsilon)
        product = self.linear(rows, weight, bias)
        return triton_layer.add_rms_norm(product, residual, norm_weight, epsilon)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return triton_layer.rms_norm(rows, weight, epsilon)


def _tiles(
    choose: Callable[[int, int, int], Tiles | None],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    halves: int = 1,
) -> Tiles | None:
    """Gives the tiles of a product on the card's copy engine; None where cuBLAS is faster, or it can't."""
    if bias is not None or rows.dim() != 2:  # noqa: PLR2004 - rows of inputs
        return None
    outputs = len(weight) // halves
    tiles = choose(len(rows), outputs, weight.shape[1])
    if tiles is None or not can_tile(rows, weight) or not can_store(outputs, rows.dtype, tiles):
        return None
    return tiles


def _is_few(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        bias is None
        and 0 < rows.numel() <= MAX_FEW_ROWS * rows.shape[-1]
        and rows.dtype is weight.dtype
        and rows.dtype in (torch.bfloat16, torch.float16)
        and rows.is_contiguous()
        and weight.stride(-1) == 1
    )


def _whole(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tiling | None:
    """Gives the tiling of a product whose programs each see all inputs; None where there is no gain."""
    if not _is_few(rows, weight, bias):
        return None
    outputs, depth = weight.shape
    if rows.numel() == depth:
        return Tiling(
            outputs=8,
            depth=256 if outputs > _LARGE else 512,
            parts=1,
            num_warps=4,
            num_stages=3 if outputs > _LARGE else 2,
        )
    if outputs < _ENOUGH * 64:
        return None
    return Tiling(outputs=64, depth=128, parts=1, num_warps=4, num_stages=4 if outputs > _LARGE else 5)


def _gated(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tiling | None:
    if not _is_few(rows, weight, bias):
        return None
    outputs, depth = weight.shape
    count = rows.numel() // depth
    if count == 1:
        is_small = depth <= _SMALL
        return Tiling(
            outputs=4 if is_small else 8, depth=1024 if is_small else 512, parts=1, num_warps=4, num_stages=2
        )
    if outputs >= _PROGRAMS * 64:
        return Tiling(outputs=64, depth=64, parts=1, num_warps=4, num_stages=6)
    if count <= MAX_FEW_ROWS // 2:
        return Tiling(outputs=32, depth=128, parts=1, num_warps=4, num_stages=5)
    return Tiling(outputs=64, depth=128, parts=1, num_warps=4, num_stages=5)


def _split(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tiling | None:
    """Gives the tiling of a product whose parts the next kernel sums; None where there is no gain."""
    if not _is_few(rows, weight, bias):
        return None
    outputs, depth = weight.shape
    if rows.numel() == depth:
        if outputs >= _SMALL:
            return None
        return Tiling(outputs=4, depth=512, parts=4 if depth <= _SMALL else 2, num_warps=4, num_stages=2)
    parts = _PROGRAMS * 64 // outputs
    if parts <= 1:
        return None
    return Tiling(outputs=64, depth=128, parts=min(parts, _MAX_PARTS), num_warps=4, num_stages=5)
