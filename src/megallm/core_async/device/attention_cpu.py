"""Attention and layer arithmetic by the CPU kernels.

Knows how a step's batch is laid out for the kernels; what they compute is said in cpu_kernels.py.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.cpu_kernels import CpuKernels
from megallm.core_async.device.cpu_linear import make_fast, restore
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.rope import rotated


class CpuAttention:
    """Attention by the paged kernel: one call for all rows of a step, decode rows and chunks alike."""

    name = "cpu"
    norms_heads = False

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._batch: AttentionBatch | None = None

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; see `Attention.refusal`."""
        if shape.softcap is not None:
            return "it has no softcap on scores (attn_logit_softcapping)"
        return "it has no attention sinks (softmax_type)" if shape.has_sinks else None

    def begin_step(self, batch: AttentionBatch) -> None:
        """Takes the step's batch; the kernel reads it as it is."""
        self._batch = batch

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch, shape = self._batch, layer.shape
        assert batch is not None, "attend before begin_step"
        assert layer.norms is None, "queries and keys must arrive normed"
        query = query.flatten(1, -2)
        cosines, sines = (batch.cosines, batch.sines) if shape.uses_rope else (None, None)
        if cosines is not None and sines is not None and batch.is_rope_interleaved:
            query = rotated(query, cosines, sines, is_interleaved=True)
            key = rotated(key, cosines, sines, is_interleaved=True)
            cosines = sines = None
        keys, values = layer.cache.keys, layer.cache.values
        self._kernels.rope_and_cache_write(query, key, value, cosines, sines, batch.slots, keys, values)
        out = query.new_empty(batch.num_tokens, shape.num_heads, shape.value_head_dim)
        self._kernels.paged_attention(
            query,
            keys,
            values,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lengths,
            shape.scale,
            out,
            shape.window,
        )
        return out.view(batch.num_tokens, -1)


class CpuOps:
    """`dense_layer.LayerOps` by the CPU kernels."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is: the kernel takes it so."""
        del weight
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        return self._kernels.linear(rows, weight, bias)

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`."""
        return self._kernels.linear(rows, weight, bias).add_(residual)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return self._kernels.rms_norm(rows, weight, epsilon)

    def add_rms_norm(
        self, rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Gives `rows + residual`, in the place of `rows`, and its norm."""
        return rows, self._kernels.add_rms_norm(residual, rows, weight, epsilon)

    def silu_gate(self, rows: Tensor) -> Tensor:
        """Gives SiLU of the first half of each row, times the second half."""
        return self._kernels.silu_mul(rows)

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
        return self.add_rms_norm(self.linear(rows, weight, bias), residual, norm_weight, epsilon)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of the first half, times the second."""
        return self.silu_gate(self.linear(rows, weight, bias))


class ColumnMajorOps(TorchOps):
    """torch's arithmetic on weights laid out by columns, for a CPU without compiled kernels."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Lays the weight out by columns, in place."""
        return partial(restore, weight) if make_fast(weight) else None
