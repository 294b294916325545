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

from megallm.models.megatron_config import SCORE_SOFTCAP


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
        attention.core_attention = _Causal(
            _window(model.config, attention.layer_number),
            scale=model.config.softmax_scale,
            softcap=getattr(model.config, SCORE_SOFTCAP, None),
            sinks=attention.core_attention.softmax_offset,
        )
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
    def __init__(
        self, window: int | None, *, scale: float | None, softcap: float | None, sinks: Tensor | None
    ) -> None:
        super().__init__()
        self._sinks = sinks
        self._window = window
        self._scale = scale
        self._softcap = softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes and gives `[tokens, 1, heads, head_dim]`, the result's last two dimensions as one."""
        queries, keys, values = (part[:, 0].transpose(0, 1) for part in (query, key, value))
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        mask = (distance >= 0) & (distance <= (len(query) if self._window is None else self._window))
        if self._softcap is None and self._sinks is None:
            mixed = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=self._scale, enable_gqa=True
            )
        else:
            repeats = len(queries) // len(keys)
            keys, values = (part.repeat_interleave(repeats, dim=0) for part in (keys, values))
            scores = queries @ keys.transpose(-1, -2) * (self._scale or query.shape[-1] ** -0.5)
            if self._softcap is not None:
                scores = self._softcap * (scores / self._softcap).tanh()
            scores = scores.masked_fill(~mask, -torch.inf)
            if self._sinks is not None:
                scores = torch.cat((scores, self._sinks.view(-1, 1, 1).expand(-1, len(query), 1)), dim=-1)
            mixed = scores.softmax(-1)[..., : len(query)] @ values
        return mixed.transpose(0, 1).reshape(len(query), 1, -1)
