"""How a kernel follows the one before it: launched while that still runs, where the card can.

Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"): a kernel launched so starts early and must wait, before it reads what others wrote or
writes at all, until the kernel before it has ended. Every kernel here does, so that in a chain each
knows all those before it have ended; and before it waits, all but the one ahead: what was written earlier
it may read at once. It hides what a launch costs, in graphs too.

Import it only where it runs, as the kernels.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what a kernel's parameters are is Triton's own matter)

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9
_ALONE, _EARLY, _LATE = 0, 1, 2
MAX_EARLY_TOKENS = 256
"""Of a step whose kernels start beside each other."""


def chained(tensor: Tensor) -> dict[str, int | bool]:
    """Gives the launch options of a kernel that calls `follow`; `tensor` is `[tokens, ..]`, on its device.

    In steps of few tokens the next kernel's programs start beside this one's: 1 to 3 % of a step of 32 to
    256 tokens on an H200. In larger ones they start as the last programs end: those in waiting would take
    the room that running ones need. (To fetch weights and keys into the shared cache while they wait costs
    more than it saves: 2 to 6 %, measured.)
    """
    if can_chain(tensor.device):
        return {"CHAINED": _EARLY if tensor.shape[0] <= MAX_EARLY_TOKENS else _LATE, "launch_pdl": True}
    return {"CHAINED": _ALONE}


def can_chain(device: torch.device) -> bool:
    """Says whether a device is a card from Hopper on."""
    return device.type == "cuda" and _capability(device.index or 0) >= _HOPPER


@functools.cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Waits for the kernel before this one; lets the one after it start now, or as this one ends."""
    if CHAINED != 0:
        gdc_wait()
        if CHAINED == 1:
            gdc_launch_dependents()
