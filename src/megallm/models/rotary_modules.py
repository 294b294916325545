"""The rotary modules of a megatron-core model: scaled, by the length of the text, or one for some layers.

megatron-core has one module for all layers, of plain frequencies or one of two ways to scale them. What is
more is put on the instances, so that every module stays megatron's. Knows megatron's attention by attribute.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from typing import Any, Final

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megallm.models.checkpoint import Hyperparameters
from megallm.models.rotary import inverse_frequencies

_FACTOR: Final = "_yarn_concentration_factor"
"""Where attention keeps the factor on cosines and sines: megatron has no other place for it."""


def fit_rotary(model: Any, size: Hyperparameters) -> None:  # Any: megatron's model is untyped
    """Gives a new model's rotary modules the frequencies of `size`, and attention its factor.

    Where layers with a window turn otherwise, the model's own module is theirs, since they are most, and
    each of the others has one of its own.
    """
    attentions = [
        layer.self_attention for layer in model.decoder.layers if hasattr(layer.self_attention, _FACTOR)
    ]
    model.rotary_pos_emb.rotary_interleaved = size.is_rope_interleaved  # HybridModel doesn't say it
    rotaries = [model.rotary_pos_emb]
    if size.windowed_rotary_base is not None:
        attentions = [attention for attention in attentions if not _is_windowed(attention)]
        rotaries = [_own_rotary(attention, size) for attention in attentions]
    if size.rope_scaling is None:
        return
    for rotary in rotaries:
        _scale(rotary, size)
    for attention in attentions:
        setattr(attention, _FACTOR, size.rope_scaling.attention_factor)


def _is_windowed(attention: Any) -> bool:  # Any: the same
    config = attention.config
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)


def _scale(rotary: Any, size: Hyperparameters) -> None:  # Any: the same
    rotary.inv_freq = inverse_frequencies(size).to(rotary.inv_freq.device)
    if size.rope_scaling is not None and size.rope_scaling.goes_by_length:
        rotary.get_freqs_non_repeated = _by_length(rotary, size)


def _by_length(rotary: Any, size: Hyperparameters) -> Callable[..., Tensor]:  # Any: the same
    """Gives what a module makes its angles by: those of a text of the length that is asked for."""

    def angles(max_seq_len: int, offset: int = 0) -> Tensor:
        frequencies = inverse_frequencies(size, offset + max_seq_len)
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32)
        return torch.outer(positions, frequencies).to(rotary.inv_freq.device)

    return angles


def _own_rotary(attention: Any, size: Hyperparameters) -> RotaryEmbedding:  # Any: the same
    """Makes a layer turn by a module of its own, whatever the model hands it."""
    rotary = RotaryEmbedding(
        size.head_dim,
        size.turned_dim / size.head_dim,
        rotary_base=size.rotary_base,  # pyright: ignore[reportArgumentType] - any number will do
        rotary_interleaved=size.is_rope_interleaved,
        use_cpu_initialization=True,
    )
    attention.rotary_pos_emb = rotary
    attention.register_forward_pre_hook(_turned_by_own, with_kwargs=True)
    return rotary


def _turned_by_own(
    attention: Any, args: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:  # Any: the same, and options of many types
    return args, options | {"rotary_pos_emb": attention.rotary_pos_emb(len(args[0]))}
