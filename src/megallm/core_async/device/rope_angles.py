"""The angles that a rotary module of megatron's would turn by, for every position at once.

Asks the module by attribute; imports no megatron.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from megallm.core_async.device.swaps import Swaps
from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads


def angles_of(
    rotary: MegatronModule, max_positions: int, device: torch.device
) -> tuple[Tensor, float | None]:
    """Gives the float32 angles, `[max_positions, 1, 1, rotary_dim]`, and YaRN's factor where there is one.

    Asked of a copy, and told that `device` is the current one: the module moves its frequencies to the
    current CUDA device as it answers, and a CPU has none.

    Raises: UnsupportedModelError for a module whose angles depend on more than the position.
    """
    kind: MegatronModule = type(rotary)
    # one that answers in a way of its own, as the bridge's for Gemma 3 with two tables, would be misread
    if not hasattr(rotary, "get_emb") or not str(kind.forward.__module__).startswith("megatron.core."):
        raise UnsupportedModelError(
            f"the rotary module is a {kind.__name__}; supported are RotaryEmbedding and YarnRotaryEmbedding, "
            "a model's own or a layer's"
        )
    swaps = Swaps()
    if device.type != "cuda":
        swaps.set(torch.cuda, "current_device", lambda: device)
    try:
        answer = copy.copy(rotary).get_emb(max_positions)
    finally:
        swaps.undo()
    angles, factor = answer if isinstance(answer, tuple) else (answer, None)
    return angles.to(device), factor
