"""Which attention and which arithmetic a model runs on: by the user's word, device, dtype and layers."""

import importlib.util
import logging

import torch
from msgspec import Struct

from megallm.core_async.device.attention import Attention, refusals
from megallm.core_async.device.attention_choice import MIN_KEYS, MIN_QUERIES, ChosenAttention
from megallm.core_async.device.attention_cpu import ColumnMajorOps, CpuAttention, CpuOps
from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.cpu_kernels import CpuKernels, load_kernels
from megallm.core_async.device.dense_layer import LayerOps, TorchOps
from megallm.core_async.device.flash_libraries import has_flash, load_flash
from megallm.core_async.device.layer_shapes import ModelShape
from megallm.core_async.errors import UnsupportedModelError

log = logging.getLogger(__name__)


class Backend(Struct, frozen=True, eq=False):
    """What a bound model computes with."""

    attention: Attention
    ops: LayerOps
    is_batch_invariant: bool = False
    """A dense layer's row is the same to the bit whatever rows are computed beside it."""
    is_capturable: bool = False
    """A step of decode rows can be captured as a CUDA graph."""


def check_backend(name: str, device: torch.device) -> None:
    """Raises UnsupportedModelError for a backend that the device has not, listing those that it has."""
    known = _names(device)
    if name not in known:
        raise UnsupportedModelError(
            f"attention_backend is {name!r}; on {device.type} there are {', '.join(known)}"
        )


def backend_for(
    name: str,
    model: ModelShape,
    *,
    block_size: int,
    max_sequence_length: int = 0,
    is_batch_invariant: bool = False,
    kernels: CpuKernels | None = None,
) -> Backend:
    """Gives the backend of that name, or for "auto" the fastest that runs every layer of the model.

    `is_batch_invariant`: the one whose rows do not depend on each other, where the device has one; the
    backend says whether it is. `kernels`: for a model on a CPU; else loaded here, and compiled, in seconds,
    the first time on a machine.

    Raises: UnsupportedModelError when a backend asked for by name can't run some layer.
    """
    check_backend(name, model.device)
    sdpa = SdpaAttention(block_size)
    if model.device.type != "cpu":
        if name == "sdpa" or not _has_triton():
            return Backend(attention=sdpa, ops=TorchOps())
        if is_batch_invariant:
            return _invariant_backend(name, model, sdpa)
        return _cuda_backend(name, model, sdpa, block_size, max_sequence_length)
    kernels = load_kernels() if kernels is None else kernels
    cpu = CpuAttention(kernels)
    reasons = refusals(cpu, model.attention_layers)
    if name == "cpu" and reasons:
        raise UnsupportedModelError(f"attention_backend 'cpu' can't run this model: {'; '.join(reasons)}")
    if model.dtype is not torch.float32:
        ops = TorchOps()
    else:
        ops = CpuOps(kernels) if kernels.is_compiled else ColumnMajorOps()
    takes_cpu = name == "cpu" or (name == "auto" and isinstance(ops, CpuOps) and not reasons)
    return Backend(
        attention=cpu if takes_cpu else sdpa,
        ops=ops,
        is_batch_invariant=takes_cpu and isinstance(ops, CpuOps),
    )


# ---- CUDA: what needs Triton is imported where it is asked for, since Triton is where CUDA is -------


def _cuda_backend(
    name: str, model: ModelShape, sdpa: SdpaAttention, block_size: int, max_sequence_length: int
) -> Backend:
    from megallm.core_async.device.attention_triton import TritonAttention  # noqa: PLC0415
    from megallm.core_async.device.triton_ops import TritonOps  # noqa: PLC0415

    if name == "flash":
        flash = _flash(model, block_size)
        reasons = refusals(flash, model.attention_layers)
        if reasons:
            raise UnsupportedModelError(
                f"attention_backend 'flash' can't run this model: {'; '.join(reasons)}"
            )
        return Backend(attention=flash, ops=TritonOps(), is_capturable=True)
    triton = TritonAttention()
    reasons = refusals(triton, model.attention_layers)
    if name == "triton" and reasons:
        raise UnsupportedModelError(f"attention_backend 'triton' can't run this model: {'; '.join(reasons)}")
    if reasons:
        log.info("attention: sdpa, since triton can't run this model: %s", "; ".join(reasons))
        return Backend(attention=sdpa, ops=TritonOps())
    if name == "auto" and has_flash() and max_sequence_length >= MIN_KEYS:
        chosen = _with_flash(triton, model, block_size)
        if chosen is not None:
            return Backend(attention=chosen, ops=TritonOps(), is_capturable=True)
    return Backend(attention=triton, ops=TritonOps(), is_capturable=True)


def _flash(model: ModelShape, block_size: int) -> Attention:
    from megallm.core_async.device.attention_flash import FlashAttention  # noqa: PLC0415

    library = load_flash(model.device)
    log.info("attention_backend 'flash' is %s", library.name)
    return FlashAttention(library, block_size, model.dtype)


def _with_flash(triton: Attention, model: ModelShape, block_size: int) -> Attention | None:
    """Gives flash-attn for long chunks beside our kernels; None where the installed one is no gain."""
    try:
        library = load_flash(model.device)
    except UnsupportedModelError as error:
        log.info("attention: triton alone; %s", error)
        return None
    if not library.is_ahead:
        log.info("attention: triton alone, which is as fast as %s", library.name)
        return None
    from megallm.core_async.device.attention_flash import FlashAttention  # noqa: PLC0415

    flash = FlashAttention(library, block_size, model.dtype)
    reasons = refusals(flash, model.attention_layers)
    if reasons:
        log.info(
            "attention: triton alone, since %s can't run this model: %s", library.name, "; ".join(reasons)
        )
        return None
    log.info(
        "attention: %s for steps with %d queries of chunks and a row of %d keys or more, triton for others",
        library.name,
        MIN_QUERIES,
        MIN_KEYS,
    )
    return ChosenAttention(triton, flash)


def _invariant_backend(name: str, model: ModelShape, sdpa: SdpaAttention) -> Backend:
    from megallm.core_async.device.attention_invariant import InvariantAttention  # noqa: PLC0415
    from megallm.core_async.device.invariant_ops import InvariantOps  # noqa: PLC0415
    from megallm.core_async.device.triton_ops import TritonOps  # noqa: PLC0415

    attention = InvariantAttention()
    is_known = name in ("auto", "triton") and model.dtype in (torch.bfloat16, torch.float16)
    if not is_known or refusals(attention, model.attention_layers):
        return Backend(attention=sdpa, ops=TritonOps())
    return Backend(attention=attention, ops=InvariantOps(), is_batch_invariant=True, is_capturable=True)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _names(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["auto", "sdpa", "cpu"]
    if not _has_triton():
        return ["auto", "sdpa"]
    return ["auto", "sdpa", "triton", *(["flash"] if has_flash() else [])]
