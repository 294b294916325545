"""A plain causal forward pass through a megatron-core model, without any engine.

megatron's own attention needs CUDA, and its rotary module asks for the current CUDA device; for the
length of one pass an attention of a few lines stands in its place and the CPU is that device, so that
what is tested is the rest: weights, layout and config.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def plain_logits(model: Any, ids: list[int]) -> Tensor:  # Any: megatron's model is untyped
    """Gives the logits at every position, `[tokens, vocab]`, of one sequence computed in one pass."""
    positions = torch.arange(len(ids))
    with torch.inference_mode(), _plain(model):
        return model(torch.tensor([ids]), positions[None], None)[0].clone()


@contextmanager
def _plain(model: Any) -> Generator[None]:  # Any: the same
    attentions = [
        layer.self_attention
        for layer in model.decoder.layers
        if hasattr(layer.self_attention, "core_attention")
    ]
    cores = [attention.core_attention for attention in attentions]
    for attention in attentions:
        attention.core_attention = _Causal(_window(model.config, attention.layer_number))
    try:
        with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):
            yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core


def _window(config: Any, layer_number: int) -> int | None:  # Any: the same
    is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return config.window_size[0] if is_windowed else None


class _Causal(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self._window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes and gives `[tokens, 1, heads, head_dim]`, the result's last two dimensions as one."""
        queries, keys, values = (part[:, 0].transpose(0, 1) for part in (query, key, value))
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        mask = (distance >= 0) & (distance <= (len(query) if self._window is None else self._window))
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(len(query), 1, -1)
