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

_HOPPER, _BLACKWELL = 9, 10
_ALONE, _EARLY, _LATE = 0, 1, 2
MAX_EARLY_TOKENS, MAX_EARLY_WIDTH = 256, 3072
"""Of a step whose kernels start beside each other, and of the tensors between them."""


def chained(tensor: Tensor) -> dict[str, int | bool]:
    """Gives the launch options of a kernel that calls `follow`; `tensor` is `[tokens, ..]`, on its device.

    In steps of few tokens the next kernel's programs start beside this one's: on an H200 1 to 3 % less time
    for 32 to 256 tokens where hidden states have 1,024 numbers, and 3 % more where they have 4,096, so not
    there: programs in waiting take the room that running ones need. Else they start as the last programs
    end. (To fetch weights and keys into the shared cache while they wait costs more than it saves.)
    """
    if can_chain(tensor.device):
        return {"CHAINED": _EARLY if starts_next_early(tensor) else _LATE, "launch_pdl": True}
    return {"CHAINED": _ALONE}


def alone() -> dict[str, int | bool]:
    """Gives the same options for a kernel that starts when all before it have ended, so reads at once."""
    return {"CHAINED": _ALONE}


def starts_next_early(tensor: Tensor) -> bool:
    """Says whether the next kernel starts beside one whose tensors are as this, `[tokens, ..]`."""
    num_tokens = tensor.shape[0]
    return num_tokens == 1 or (
        num_tokens <= MAX_EARLY_TOKENS and tensor.numel() <= num_tokens * MAX_EARLY_WIDTH
    )


def has_large_tiles(device: torch.device) -> bool:
    """Says whether a multiprocessor has 227 KiB for a program: the larger cards of both generations."""
    return device.type == "cuda" and _capability(device.index or 0) in (_HOPPER, _BLACKWELL)


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
