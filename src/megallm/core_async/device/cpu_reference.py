"""The CPU kernels in plain torch: the reference, and what runs without a compiler or in other dtypes.

What each does is said once, in cpu_kernels.py.
"""

import torch
from torch import Tensor
from torch.nn import functional


class TorchKernels:
    """`cpu_kernels.CpuKernels` by torch's own functions."""

    is_compiled = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See cpu_kernels.CpuKernels."""
        return functional.linear(x, weight, bias)

    def paged_attention(  # noqa: PLR0917 - the order in which a kernel takes tensors
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        scale: float,
        out: Tensor,
        window: int | None = None,
    ) -> None:
        """See cpu_kernels.CpuKernels."""
        block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        starts, lengths = query_starts.tolist(), context_lengths.tolist()
        for row, (first, last, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            check_row(row, last - first, length)
            begin = 0 if window is None else max(0, length - (last - first) - window)
            positions = torch.arange(begin, length)
            slots = block_tables[row, positions // block_size].long() * block_size + positions % block_size
            distances = torch.arange(length - (last - first), length)[:, None] - positions
            is_seen = distances >= 0 if window is None else (distances >= 0) & (distances <= window)
            out[first:last] = functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1),
                keys[slots].transpose(0, 1).repeat_interleave(group, dim=0),
                values[slots].transpose(0, 1).repeat_interleave(group, dim=0),
                attn_mask=is_seen,
                scale=scale,
            ).transpose(0, 1)

    def rope_and_cache_write(  # noqa: PLR0917 - the order in which a kernel takes tensors
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """See cpu_kernels.CpuKernels."""
        if cos is not None and sin is not None:
            for vectors in (q, k):
                turning = vectors[..., : cos.shape[-1]]
                first, second = turning.chunk(2, dim=-1)
                quarter_turned = torch.cat((-second, first), dim=-1)
                turning.copy_(turning * cos[:, None] + quarter_turned * sin[:, None])
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See cpu_kernels.CpuKernels."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See cpu_kernels.CpuKernels."""
        return functional.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See cpu_kernels.CpuKernels."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See cpu_kernels.CpuKernels."""
        return self.silu_mul(functional.linear(x, weight, bias))


def check_row(row: int, num_queries: int, context_length: int) -> None:
    """Raises ValueError for a row that can't attend."""
    if not 1 <= num_queries <= context_length:
        raise ValueError(
            f"row {row} has {num_queries} queries and a context of {context_length} tokens; "
            "a row needs at least one query, and its queries are part of its context"
        )
