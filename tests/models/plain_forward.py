"""A plain causal forward pass through a megatron-core GPTModel, without any engine.

megatron's own rotary table and attention need CUDA; for the length of one pass these stand in their
place, so that what is tested is the rest: weights, layout and config.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def plain_logits(model: Any, ids: list[int]) -> Tensor:  # Any: megatron's model is untyped
    """Gives the logits at every position, `[tokens, vocab]`, of one sequence computed in one pass."""
    positions = torch.arange(len(ids))
    with torch.inference_mode(), _plain(model, len(ids)):
        return model(torch.tensor([ids]), positions[None], None)[0].clone()


@contextmanager
def _plain(model: Any, num_tokens: int) -> Generator[None]:
    attentions = [layer.self_attention for layer in model.decoder.layers]
    rotary, cores = model.rotary_pos_emb, [attention.core_attention for attention in attentions]
    model.rotary_pos_emb = _Rotary(model.config.kv_channels, rotary.inv_freq, num_tokens)
    for attention in attentions:
        attention.core_attention = _Causal()
    try:
        yield
    finally:
        model.rotary_pos_emb = rotary
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core


class _Rotary(nn.Module):
    def __init__(self, head_dim: int, frequencies: Tensor, num_tokens: int) -> None:
        super().__init__()
        assert frequencies.shape == (head_dim // 2,)
        half = torch.outer(torch.arange(num_tokens, dtype=torch.float32), frequencies)
        self.table = torch.cat([half, half], dim=-1)[:, None, None]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        return len(self.table)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.table


class _Causal(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes and gives `[tokens, 1, heads, head_dim]`, the result's last two dimensions as one."""
        queries, keys, values = (part[:, 0].transpose(0, 1) for part in (query, key, value))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(len(query), 1, -1)
