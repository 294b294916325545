"""flash-attn 4, 3 and 2, whichever is installed, each by its public functions, as one call for paged rows.

Knows the packages' functions and their limits; knows no step. Nothing is imported before `load_flash`:
flash-attn 4 takes seconds, and seconds more for each kind of layer that it compiles.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.errors import UnsupportedModelError

PACKAGES = ("flash_attn", "flash_attn_interface")
"""What holds versions 2 and 4, and what holds version 3."""
MAX_HEAD_DIM = 256
_PAGE = 256
"""Version 2 takes blocks of a multiple of so many tokens."""

type FlashFunction = Callable[..., Tensor | Sequence[Tensor]]


class FlashRows(Struct, frozen=True, eq=False):
    """A step's rows as the packages take them, all int32 and on the device."""

    query_starts: Tensor
    """`[rows + 1]`"""
    kv_lengths: Tensor
    """`[rows]`"""
    kv_starts: Tensor
    """`[rows + 1]`: the same, summed up."""
    block_tables: Tensor
    """`[rows, blocks]`"""
    max_query_length: int
    max_kv_length: int


class FlashLibrary(Protocol):
    """One version of the package."""

    @property
    def name(self) -> str:
        """Package and version."""
        ...

    @property
    def is_ahead(self) -> bool:
        """It attends for long chunks faster than our kernels do, as measured on an H200."""
        ...

    def refusal(self, shape: LayerShape, *, block_size: int) -> str | None:
        """Says why it can't run such a layer; None when it can."""
        ...

    def attend(self, layer: PagedLayer, query: Tensor, rows: FlashRows) -> Tensor:
        """Gives `[tokens, num_heads, value_head_dim]` of `[tokens, num_heads, head_dim]`."""
        ...


class FlashAttn4:
    """flash-attn 4: `flash_attn.cute.flash_attn_varlen_func`.

    Reads to the end of a row's last block, and takes no notice of what is there as long as it is finite.
    """

    name = "flash-attn 4"
    is_ahead = True

    def __init__(self, varlen: FlashFunction) -> None:
        self._varlen = varlen

    def refusal(self, shape: LayerShape, *, block_size: int) -> str | None:
        """Says why it can't run such a layer."""
        del block_size
        return _head_refusal(shape, self.name)

    def attend(self, layer: PagedLayer, query: Tensor, rows: FlashRows) -> Tensor:
        """Attends for all rows at once; see `FlashLibrary.attend`."""
        shape = layer.shape
        return _first(
            self._varlen(
                query,
                layer.cache.keys,
                layer.cache.values,
                cu_seqlens_q=rows.query_starts,
                max_seqlen_q=rows.max_query_length,
                max_seqlen_k=rows.max_kv_length,
                seqused_k=rows.kv_lengths,
                page_table=rows.block_tables,
                softmax_scale=shape.scale,
                causal=True,
                window_size=(None, None) if shape.window is None else (shape.window, 0),
                learnable_sink=layer.sinks,
                softcap=shape.softcap or 0.0,
            )
        )


class FlashAttn3:
    """flash-attn 3: `flash_attn_interface.flash_attn_with_kvcache`, which takes rows of any length."""

    name = "flash-attn 3"
    is_ahead = False  # not measured

    def __init__(self, with_kvcache: FlashFunction) -> None:
        self._with_kvcache = with_kvcache

    def refusal(self, shape: LayerShape, *, block_size: int) -> str | None:
        """Says why it can't run such a layer."""
        del block_size
        return _head_refusal(shape, self.name) or _plain_refusal(shape, self.name)

    def attend(self, layer: PagedLayer, query: Tensor, rows: FlashRows) -> Tensor:
        """Attends for all rows at once; see `FlashLibrary.attend`."""
        shape = layer.shape
        return _first(
            self._with_kvcache(
                query,
                layer.cache.keys,
                layer.cache.values,
                cache_seqlens=rows.kv_lengths,
                page_table=rows.block_tables,
                cu_seqlens_q=rows.query_starts,
                max_seqlen_q=rows.max_query_length,
                softmax_scale=shape.scale,
                causal=True,
                window_size=(-1, -1) if shape.window is None else (shape.window, 0),
                softcap=shape.softcap or 0.0,
            )
        )


class FlashAttn2:
    """flash-attn 2: `flash_attn_with_kvcache` for decode rows alone, `flash_attn_varlen_func` for others."""

    name = "flash-attn 2"
    is_ahead = False

    def __init__(self, varlen: FlashFunction, with_kvcache: FlashFunction) -> None:
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def refusal(self, shape: LayerShape, *, block_size: int) -> str | None:
        """Says why it can't run such a layer."""
        if block_size % _PAGE:
            return (
                f"block_size_tokens is {block_size}, and {self.name} takes a multiple of {_PAGE}; "
                f"set InferenceConfig.block_size_tokens to {_PAGE}, or take another backend"
            )
        return _head_refusal(shape, self.name) or _plain_refusal(shape, self.name)

    def attend(self, layer: PagedLayer, query: Tensor, rows: FlashRows) -> Tensor:
        """Attends for all rows at once; see `FlashLibrary.attend`."""
        shape, keys, values = layer.shape, layer.cache.keys, layer.cache.values
        window = (-1, -1) if shape.window is None else (shape.window, 0)
        softcap = shape.softcap or 0.0
        if rows.max_query_length == 1:
            attended = self._with_kvcache(
                query[:, None],
                keys,
                values,
                cache_seqlens=rows.kv_lengths,
                block_table=rows.block_tables,
                softmax_scale=shape.scale,
                causal=True,
                window_size=window,
                softcap=softcap,
            )
            return _first(attended)[:, 0]
        return _first(
            self._varlen(
                query,
                keys,
                values,
                cu_seqlens_q=rows.query_starts,
                cu_seqlens_k=rows.kv_starts,
                max_seqlen_q=rows.max_query_length,
                max_seqlen_k=rows.max_kv_length,
                softmax_scale=shape.scale,
                causal=True,
                window_size=window,
                softcap=softcap,
                block_table=rows.block_tables,
            )
        )


def has_flash() -> bool:
    """Says whether some version is there, without importing it."""
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES)


def load_flash(device: torch.device) -> FlashLibrary:
    """Gives the newest version that is installed and runs on the device.

    Raises: UnsupportedModelError with what each version lacks.
    """
    lacks: list[str] = []
    is_hopper = torch.cuda.get_device_capability(device)[0] >= 9  # noqa: PLR2004 - compute capability
    try:
        if is_hopper:
            return FlashAttn4(_function("flash_attn.cute", "flash_attn_varlen_func"))
        lacks.append("flash-attn 4 and 3 need compute capability 9.0")
    except ImportError as error:
        lacks.append(f"flash-attn 4: {error}")
    try:
        if is_hopper:
            return FlashAttn3(_function("flash_attn_interface", "flash_attn_with_kvcache"))
    except ImportError as error:
        lacks.append(f"flash-attn 3: {error}")
    try:
        return FlashAttn2(
            _function("flash_attn", "flash_attn_varlen_func"),
            _function("flash_attn", "flash_attn_with_kvcache"),
        )
    except ImportError as error:
        lacks.append(f"flash-attn 2: {error}")
    raise UnsupportedModelError(
        f"attention_backend is 'flash' and no flash-attn can be loaded ({'; '.join(lacks)}); "
        "install megallm[flash4] or megallm[flash], or take 'auto'"
    )


def _function(module: str, name: str) -> FlashFunction:
    """Imports a package's public function. Raises: ImportError."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    return cast("FlashFunction", found)  # an untyped package's


def _first(result: Tensor | Sequence[Tensor]) -> Tensor:
    """Gives the output alone: some versions give the sums of weights with it."""
    return result if isinstance(result, Tensor) else result[0]


def _head_refusal(shape: LayerShape, name: str) -> str | None:
    widest = max(shape.head_dim, shape.value_head_dim)
    if widest > MAX_HEAD_DIM or shape.head_dim % 8 or shape.value_head_dim % 8:
        return (
            f"a head has {shape.head_dim} and {shape.value_head_dim} dimensions, "
            f"and {name} takes multiples of 8 up to {MAX_HEAD_DIM}"
        )
    return None


def _plain_refusal(shape: LayerShape, name: str) -> str | None:
    if shape.has_sinks:
        return f"{name} has no attention sinks (softmax_type)"
    if shape.head_dim != shape.value_head_dim:
        return (
            f"{name} takes values as wide as keys, which have {shape.value_head_dim} and {shape.head_dim} "
            "dimensions"
        )
    return None
