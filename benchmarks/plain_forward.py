"""A plain forward pass of a megatron-core model over one whole sequence, as a trainer runs it.

On a GPU every module is megatron's own. On a CPU its attention asks for CUDA's random state and its rotary
positions for the current CUDA device, so there they are handed torch's attention, and the CPU.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional


def plain_logits(model: Any, tokens: list[int]) -> Tensor:
    """Gives `[tokens, vocab]`. Any: megatron's model is untyped."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return model(ids, positions, None)[0]
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=device))
        for layer in model.decoder.layers:
            core = layer.self_attention.core_attention
            patched.enter_context(mock.patch.object(core, "forward", _attend))
        return model(ids, positions, None)[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_ignored: object) -> Tensor:
    """Attends over `[tokens, 1, heads, head_dim]`."""
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.permute(2, 0, 1, 3).flatten(2)
