"""A layer's arithmetic on CUDA where every row is to be the same to the bit whatever rows are beside it.

Knows which kernel keeps that; knows no step and no model. Import it only where it runs, as the kernels.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from megallm.core_async.device import triton_layer
from megallm.core_async.device.graph_sizes import TOKENS
from megallm.core_async.device.triton_invariant_linear import product

log = logging.getLogger(__name__)

SLICE = 2048
"""Rows of a slice of many rows: one number of rows instead of any."""
SIZES = (*range(48, 513, 16), *(size for size in TOKENS if size > 512), 2 * SLICE, 4 * SLICE)  # noqa: PLR2004
"""Numbers of rows for which the library is tried: those of graphs, and slices. Below, it is not faster."""


class InvariantOps:
    """`dense_layer.LayerOps` by products in one order of summing; norms and gates see a row at a time.

    The library, cuBLAS, is faster from some fifty rows on, and sums in the same order wherever it does not
    split the inputs. Which of its kernels it takes depends on the numbers of rows, outputs and inputs alone:
    so it is asked for a product of random rows, once for each, and taken where every bit is as ours.
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self._sizes = sorted(sizes, reverse=True)
        self._equal: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        """Numbers of rows, the largest first, for which the library gives the same bits, by weight."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is; tries the library on its shape."""
        key = (weight.shape, weight.dtype)
        if key not in self._equal:
            rows = torch.randn(self._sizes[0], weight.shape[1], dtype=weight.dtype, device=weight.device)
            random = torch.randn_like(weight)
            self._equal[key] = [
                size
                for size in self._sizes
                if functional.linear(rows[:size], random).equal(product(rows[:size], random))
            ]
            log.debug("products of %s by cuBLAS: %s rows", tuple(weight.shape), self._equal[key])
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        flat = rows.reshape(-1, rows.shape[-1])
        out = self._product(flat if flat.is_contiguous() else flat.contiguous(), weight)
        if bias is not None:
            out += bias
        return out.view(*rows.shape[:-1], len(weight))

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`."""
        return self.linear(rows, weight, bias).add_(residual)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return triton_layer.rms_norm(rows, weight, epsilon)

    def add_linear_norm(  # noqa: PLR0917 - a residual, a linear layer, a norm
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
        del may_overwrite
        return triton_layer.add_rms_norm(self.linear(rows, weight, bias), residual, norm_weight, epsilon)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of each row's first half, times the second."""
        return triton_layer.silu_gate(self.linear(rows, weight, bias))

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        sizes = self._equal.get((weight.shape, weight.dtype), [])
        count = len(rows)
        if count in sizes:
            return functional.linear(rows, weight)
        first, slices = 0, [size for size in sizes if size % SLICE == 0]
        if not slices or count < slices[-1]:
            return product(rows, weight)
        out = torch.empty((count, len(weight)), dtype=rows.dtype, device=rows.device)
        for size in slices:
            while count - first >= size:
                torch.mm(rows[first : first + size], weight.T, out=out[first : first + size])
                first += size
        if first < count:
            product(rows[first:], weight, out=out[first:])
        return out
