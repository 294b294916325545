"""What a model of megatron's and its attention layers are, in the engine's terms.

Reads the layer and its config by attribute; imports no megatron.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.model_options import SUPPORTED
from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads


class ModelShape(Struct, frozen=True):
    """What the rest of the engine has to know of the model on this rank."""

    attention_layers: list[LayerShape]
    """In the order of the forward pass; layers without attention have no entry."""
    num_layers: int
    layer_weights: int
    """Weights in the matrices of a layer, this rank's part of them, on average; 0 without layers."""
    vocab_size: int
    max_positions: int | None
    """How many positions the model has learned; None where positions have no end."""
    dtype: torch.dtype
    device: torch.device


def weights_of_layer(layers: Sequence[nn.Module]) -> int:
    """Gives how many weights a layer's matrices have on average; vectors and experts' stacks don't count."""
    weights = sum(
        parameter.numel()
        for layer in layers
        for parameter in layer.parameters()
        if parameter.dim() == 2  # noqa: PLR2004 - a matrix
    )
    return weights // max(len(layers), 1)


def self_attention_shape(
    config: MegatronModule, attention: MegatronModule, *, window: int | None, has_rope: bool
) -> LayerShape:
    """Gives the shape of a SelfAttention; `has_rope`: queries and keys arrive not yet turned.

    Those of a layer that has a rotary module of its own are turned by megatron.
    """
    no_rope = config.no_rope_freq
    is_unturned = (no_rope and no_rope[attention.layer_number - 1]) or (
        getattr(attention, "rotary_pos_emb", None) is not None
    )
    scale = config.softmax_scale
    return LayerShape(
        num_heads=attention.num_attention_heads_per_partition,
        num_kv_heads=attention.num_query_groups_per_partition,
        head_dim=attention.key_hidden_size,
        value_head_dim=attention.val_hidden_size,
        scale=1 / math.sqrt(attention.key_hidden_size) if scale is None else scale,
        window=window,
        softcap=softcap_of(config),
        uses_rope=has_rope and not is_unturned,
        has_sinks=config.softmax_type != "vanilla",
    )


def latent_attention_shape(
    config: MegatronModule, attention: MegatronModule, *, window: int | None, has_rope: bool
) -> LayerShape:
    """Gives the shape of an MLASelfAttention: keys and values are cached expanded, turned by megatron."""
    del has_rope
    return LayerShape(
        num_heads=attention.num_attention_heads_per_partition,
        num_kv_heads=attention.num_attention_heads_per_partition,
        head_dim=attention.q_head_dim,
        value_head_dim=config.v_head_dim,
        scale=attention.softmax_scale,
        window=window,
        softcap=softcap_of(config),
        uses_rope=False,
        has_sinks=config.softmax_type != "vanilla",
    )


def window_of(config: MegatronModule, name: str) -> int | None:
    """Gives how many tokens back a layer with a window sees; refuses windows that reach ahead."""
    before, after = config.window_size
    if after > 0:
        raise UnsupportedModelError(f"{name} attends {after} tokens ahead (window_size); {SUPPORTED}")
    return None if before < 0 else before


def softcap_of(config: MegatronModule) -> float | None:
    """Gives the bound on a layer's scores, where a config has one: a field of the bridge's Gemma 2, say."""
    return getattr(config, "attn_logit_softcapping", None) or None


def sinks_of(attention: MegatronModule, shape: LayerShape) -> Tensor | None:
    """Gives a layer's own sink logits, `[num_heads]`; the off-by-one softmax is a sink of zero."""
    if not shape.has_sinks:
        return None
    offset = getattr(attention.core_attention, "softmax_offset", None)
    if offset is not None:
        return offset
    weight = next(attention.parameters())
    return torch.zeros(shape.num_heads, dtype=weight.dtype, device=weight.device)
