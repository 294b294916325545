"""A layer's arithmetic on CUDA: cuBLAS for many rows, own kernels for few and for all that is no product.

Knows which kernel takes which product; knows no step and no model. Import it only where it runs, as the
kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from megallm.core_async.device import triton_layer
from megallm.core_async.device.triton_linear import Tiling, add_rms_norm_of_parts, few_rows

MAX_FEW_ROWS = 32
"""Rows up to which own kernels are faster than cuBLAS, whose tiles are then mostly empty."""
_SMALL = 2048
"""Outputs below which a product alone can't fill the card, and its inputs are split."""
_PROGRAMS = 128
"""Programs that fill the card with bands of 64 outputs."""
_MAX_PARTS = 8


class TritonOps:
    """`dense_layer.LayerOps` by cuBLAS products and the Triton kernels."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is: the kernels take it so."""
        del weight
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        tiling = _whole(rows, weight, bias)
        if tiling is None:
            return functional.linear(rows, weight, bias)
        few = rows.view(-1, rows.shape[-1])
        return few_rows(few, weight, tiling).view(*rows.shape[:-1], -1)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of each row's first half, times the second."""
        tiling = _gated(rows, weight, bias)
        if tiling is None:
            return triton_layer.silu_gate(functional.linear(rows, weight, bias))
        return few_rows(rows, weight, tiling, is_gated=True)

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
    ) -> tuple[Tensor, Tensor]:
        """Gives `residual + rows @ weight.T + bias` and its norm."""
        tiling = _split(rows, weight, bias)
        if tiling is None:
            product = self.linear(rows, weight, bias)
            return triton_layer.add_rms_norm(product, residual, norm_weight, epsilon)
        parts = few_rows(rows, weight, tiling)
        return add_rms_norm_of_parts(parts, residual, norm_weight, epsilon)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return triton_layer.rms_norm(rows, weight, epsilon)


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
    """Gives the tiling of a product whose programs each see all inputs; None where cuBLAS is faster."""
    if not _is_few(rows, weight, bias):
        return None
    outputs, depth = weight.shape
    count = rows.numel() // depth
    if count == 1:
        is_wide = outputs > 32 * _SMALL  # an output layer
        return Tiling(
            outputs=8, depth=256 if is_wide else 512, parts=1, num_warps=4, num_stages=3 if is_wide else 2
        )
    if outputs > 32 * _SMALL:
        return Tiling(outputs=64, depth=128, parts=1, num_warps=4, num_stages=4)
    return None


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
    if outputs < _PROGRAMS * 64:
        return Tiling(outputs=32, depth=128, parts=1, num_warps=4, num_stages=5)
    return Tiling(outputs=64, depth=64, parts=1, num_warps=4, num_stages=6)


def _split(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tiling | None:
    """Gives the tiling of a product whose parts the next kernel sums; None where there is no gain."""
    if not _is_few(rows, weight, bias):
        return None
    outputs, depth = weight.shape
    if rows.numel() // depth == 1:
        if outputs >= _SMALL:
            return None
        return Tiling(outputs=4, depth=512, parts=4 if depth <= _SMALL else 2, num_warps=4, num_stages=2)
    parts = max(1, min(_MAX_PARTS, _PROGRAMS * 64 // outputs))
    if parts == 1:
        return None
    return Tiling(outputs=64, depth=128, parts=parts, num_warps=4, num_stages=4)
