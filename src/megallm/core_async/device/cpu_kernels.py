"""The kernels of a step on a CPU: compiled where there is a compiler, in plain torch elsewhere.

How to use them. `kernels = load_kernels()` once when the model is bound (three seconds the first time on a
machine, 10 ms after that), then its methods, which behave alike whether compiled or not; they run on
`torch.get_num_threads()` threads.

What to use, by measurement (AMD EPYC, Zen 4, AVX-512, 2 cores): all of it, always. `linear` takes weights as
the model holds them: they stream at the memory's speed up to 8 tokens, and from 32 tokens on it does 90-100 %
of a core's arithmetic, where torch with its best layout takes 1.1-3 times as long up to 32 tokens and
1.05-1.2 times from 128 on. So nothing is relaid or copied, nor is a tied embedding; cpu_linear.py is for
machines without a compiler. `gated_linear` instead of its two parts makes a gated MLP 7 % faster at 1 token
and 11 % at 4,096. Attention takes a quarter of gather and SDPA for decode rows, and 0.55-0.85 of SDPA for
chunks. No thread of torch's OpenMP is waited for, so a busy second core makes these kernels slower and never
stalls them (see cpu_team.cpp).

Compiled kernels are for float32; other dtypes take the torch path, call by call. A row's result does not
depend on its neighbours: `linear`, the norms, `silu_mul` and `paged_attention` give the same bits for a token
decoded alone, in a batch, or prefilled in a chunk of any size, and on any number of threads. The torch path
promises no such thing.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megallm.core_async.device.cpu_build import load_library
from megallm.core_async.device.cpu_reference import TorchKernels, check_row

SOURCE = Path(__file__).with_suffix(".cpp")

GATED_CHUNK = 512
"""Tokens that `gated_linear` multiplies and gates before the next: fastest of 64 to 4,096."""


class CpuKernels(Protocol):
    """What a step is made of. Tensors are on the CPU; unless said otherwise they are contiguous."""

    is_compiled: bool

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Gives `[..., n]`, the product of `x`, `[..., k]`, with each row of `weight`, `[n, k]`."""
        ...

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
        """Attends causally; writes `out`, `[tokens, heads, value_dim]`.

        `q` is `[tokens, heads, head_dim]`, any strides of tokens and heads; the caches
        `[num_blocks, block_size, kv_heads, head_dim]` and `[.., value_dim]`. Row r's queries are the tokens
        `query_starts[r]` to `query_starts[r + 1]`, the last of the `context_lengths[r]` tokens found through
        `block_tables[r]`; all three int32. A query sees itself and the `window` tokens before it. No slot
        outside a row's context is read.

        Raises: ValueError for a row without a query, or with more queries than context.
        """
        ...

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
        """Turns `q` and `k` in place and writes `k` and `v` to the cache at `slots`, `[tokens]` int64.

        `q` is `[tokens, heads, head_dim]`, `k` and `v` have kv_heads; any strides of tokens and heads. `cos`
        and `sin` are `[tokens, rotary_dim]` in halves: dimension d pairs with d + rotary_dim / 2, and the
        second half repeats the first. Dimensions from rotary_dim on pass; None turns nothing.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gives x / sqrt(mean of x^2 + eps) * weight over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x` to `residual` in place and gives the norm of the sum."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gives silu(gate) * up of `[..., gate then up]`."""
        ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Gives the `silu_mul` of `linear`: the same bits, and faster with many tokens.

        What lies between stays in cache, where the whole of it would go through memory.
        """
        ...


def load_kernels(*, cache_dir: Path | None = None, compiler: str | None = None) -> CpuKernels:
    """Gives the compiled kernels; those in torch where no compiler is found or it fails, with a log line.

    Takes three seconds the first time on a machine; the built file is kept in `cache_dir`, by default
    `~/.cache/megallm`. `compiler` is a program's name or path.
    """
    library = load_library(SOURCE, cache_dir=cache_dir, compiler=compiler)
    return TorchKernels() if library is None else CompiledKernels(library)


class CompiledKernels(TorchKernels):
    """The kernels of cpu_kernels.cpp, for float32; each call in another dtype runs in torch."""

    is_compiled = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = _function(library, "linear", "pppp iii i")
        self._paged_attention = _function(library, "paged_attention", "pii pp iiiii pi pp i f i p i")
        self._rope_and_cache_write = _function(
            library, "rope_and_cache_write", "piii pii pii iii pp ii pi pp i"
        )
        self._rms_norm = _function(library, "rms_norm", "pppp ii f i")
        self._silu_mul = _function(library, "silu_mul", "pp ii i")
        self._gated_linear = _function(library, "gated_linear", "ppp pp iiii i")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See CpuKernels."""
        n_size, k_size = weight.shape
        if not (x.dtype is weight.dtype is torch.float32 and weight.is_contiguous()):
            return super().linear(x, weight, bias)
        assert x.shape[-1] == k_size, f"x is {list(x.shape)}, weight {list(weight.shape)}"
        x = x.contiguous()
        y = torch.empty((*x.shape[:-1], n_size))
        self._linear(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            x.numel() // k_size,
            n_size,
            k_size,
            torch.get_num_threads(),
        )
        return y

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
        """See CpuKernels."""
        if not (q.dtype is k_cache.dtype is v_cache.dtype is out.dtype is torch.float32):
            super().paged_attention(
                q, k_cache, v_cache, block_tables, query_starts, context_lengths, scale, out, window
            )
            return
        assert block_tables.dtype is query_starts.dtype is context_lengths.dtype is torch.int32
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        assert out.is_contiguous()
        token_stride, head_stride, dim_stride = q.stride()
        _, block_size, kv_heads, head_dim = k_cache.shape
        assert dim_stride == 1 and q.shape[2] == head_dim, (q.shape, q.stride(), k_cache.shape)
        refused = self._paged_attention(
            q.data_ptr(),
            token_stride,
            head_stride,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_size,
            q.shape[1],
            kv_heads,
            head_dim,
            v_cache.shape[3],
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lengths.data_ptr(),
            len(context_lengths),
            scale,
            -1 if window is None else window,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if refused >= 0:
            first, last = query_starts[refused : refused + 2].tolist()
            check_row(refused, last - first, int(context_lengths[refused]))

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
        """See CpuKernels."""
        if not (q.dtype is k.dtype is v.dtype is k_cache.dtype is v_cache.dtype is torch.float32):
            super().rope_and_cache_write(q, k, v, cos, sin, slots, k_cache, v_cache)
            return
        assert slots.dtype is torch.int64
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        tokens, heads, head_dim = q.shape
        self._rope_and_cache_write(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            heads,
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            k.shape[1],
            head_dim,
            v.shape[2],
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            0 if cos is None else cos.stride(0),
            0 if cos is None else cos.shape[1],
            slots.data_ptr(),
            tokens,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            torch.get_num_threads(),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See CpuKernels."""
        if not (x.dtype is weight.dtype is torch.float32):
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        return self._normed(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See CpuKernels."""
        if not (x.dtype is residual.dtype is weight.dtype is torch.float32 and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        assert x.shape == residual.shape, (x.shape, residual.shape)
        return self._normed(residual, x.contiguous(), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See CpuKernels."""
        if gate_up.dtype is not torch.float32:
            return super().silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        y = torch.empty((*gate_up.shape[:-1], width))
        self._silu_mul(
            gate_up.data_ptr(), y.data_ptr(), gate_up.numel() // (2 * width), width, torch.get_num_threads()
        )
        return y

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See CpuKernels."""
        n_size, k_size = weight.shape
        if not (x.dtype is weight.dtype is torch.float32 and weight.is_contiguous()):
            return super().gated_linear(x, weight, bias)
        assert x.shape[-1] == k_size, f"x is {list(x.shape)}, weight {list(weight.shape)}"
        assert n_size % 2 == 0, f"weight is {list(weight.shape)}"
        x = x.contiguous()
        rows = x.numel() // k_size
        chunk = min(rows, GATED_CHUNK)
        between = torch.empty(chunk * n_size)
        y = torch.empty((*x.shape[:-1], n_size // 2))
        self._gated_linear(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            between.data_ptr(),
            y.data_ptr(),
            rows,
            n_size // 2,
            k_size,
            chunk,
            torch.get_num_threads(),
        )
        return y

    def _normed(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        assert len(weight) == width, f"x is {list(x.shape)}, weight {list(weight.shape)}"
        y = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            eps,
            torch.get_num_threads(),
        )
        return y


_C_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def _function(library: ctypes.CDLL, name: str, parameters: str) -> Callable[..., int]:
    """Gives a function of the library; one letter a parameter: pointer, integer or float."""
    function = library[f"megallm_{name}"]
    function.argtypes = [_C_TYPES[letter] for letter in parameters if letter != " "]
    function.restype = ctypes.c_int64
    return function
