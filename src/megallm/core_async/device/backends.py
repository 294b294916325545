"""Which attention and which arithmetic a model runs on: by the user's word, device, dtype and layers."""

import importlib.util
import logging

import torch
from msgspec import Struct

from megallm.core_async.device.attention import Attention, refusals
from megallm.core_async.device.attention_cpu import ColumnMajorOps, CpuAttention, CpuOps
from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.cpu_kernels import CpuKernels, load_kernels
from megallm.core_async.device.dense_layer import LayerOps, TorchOps
from megallm.core_async.device.model import ModelShape
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
    name: str, model: ModelShape, *, block_size: int, kernels: CpuKernels | None = None
) -> Backend:
    """Gives the backend of that name, or for "auto" the fastest that runs every layer of the model.

    `kernels`: for a model on a CPU; else loaded here, and compiled, in seconds, the first time on a machine.

    Raises: UnsupportedModelError when a backend asked for by name can't run some layer.
    """
    check_backend(name, model.device)
    sdpa = SdpaAttention(block_size)
    if model.device.type != "cpu":
        return _cuda_backend(name, model, sdpa)
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
    is_batch_invariant = takes_cpu and isinstance(ops, CpuOps)
    return Backend(attention=cpu if takes_cpu else sdpa, ops=ops, is_batch_invariant=is_batch_invariant)


def _cuda_backend(name: str, model: ModelShape, sdpa: SdpaAttention) -> Backend:
    if name == "sdpa" or not _has_triton():
        return Backend(attention=sdpa, ops=TorchOps())
    # imported here, since Triton is where CUDA is
    from megallm.core_async.device.attention_triton import TritonAttention  # noqa: PLC0415
    from megallm.core_async.device.triton_ops import TritonOps  # noqa: PLC0415

    triton = TritonAttention()
    reasons = refusals(triton, model.attention_layers)
    if name == "triton" and reasons:
        raise UnsupportedModelError(f"attention_backend 'triton' can't run this model: {'; '.join(reasons)}")
    if reasons:
        log.info("attention: sdpa, since triton can't run this model: %s", "; ".join(reasons))
        return Backend(attention=sdpa, ops=TritonOps())
    return Backend(attention=triton, ops=TritonOps(), is_capturable=True)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _names(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["auto", "sdpa", "cpu"]
    return ["auto", "sdpa", "triton"] if _has_triton() else ["auto", "sdpa"]
