"""A layer's arithmetic on CUDA where every row is to be the same to the bit whatever rows are beside it.

Knows which kernel keeps that; knows no step and no model. Import it only where it runs, as the kernels.
"""

from collections.abc import Callable

from torch import Tensor, nn

from megallm.core_async.device import triton_layer
from megallm.core_async.device.triton_invariant_linear import product


class InvariantOps:
    """`dense_layer.LayerOps` by products in one order of summing; norms and gates see a row at a time."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is: the kernels take it so."""
        del weight
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        flat = rows.reshape(-1, rows.shape[-1])
        out = product(flat if flat.stride(-1) == 1 else flat.contiguous(), weight)
        if bias is not None:
            out += bias
        return out.view(*rows.shape[:-1], len(weight))

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`."""
        return self.linear(rows, weight, bias).add_(residual)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return triton_layer.rms_norm(rows, weight, epsilon)

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
        return triton_layer.add_rms_norm(self.linear(rows, weight, bias), residual, norm_weight, epsilon)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of each row's first half, times the second."""
        return triton_layer.silu_gate(self.linear(rows, weight, bias))
