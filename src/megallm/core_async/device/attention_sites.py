"""Which of the user's modules the hook changes: attention layers, dense layers, linear layers.

With model.py the only file that imports megatron's modules. Looks at a model and changes nothing; refuses
the first layer that is not known, by name.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import get_pg_size
from msgspec import Struct
from torch import nn

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.dense_layer import has_dense_options
from megallm.core_async.device.layer_shapes import latent_attention_shape, self_attention_shape, window_of
from megallm.core_async.device.model_options import SUPPORTED
from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file is about

_CORES = {"DotProductAttention", "TEDotProductAttention"}  # by name: the second needs Transformer Engine
_CAUSAL = {AttnMaskType.causal, AttnMaskType.padding_causal}


class AttentionSite(Struct, frozen=True, eq=False):
    """An attention layer of the user's model."""

    layer: MegatronModule
    attention: MegatronModule
    shape: LayerShape


def attention_sites(model: MegatronModule) -> Iterator[AttentionSite]:
    """Yields the attention layers in order; refuses the first layer that is not known."""
    for index, layer in enumerate(model.decoder.layers):
        name = f"decoder.layers.{index}"
        if not isinstance(layer, TransformerLayer):
            raise UnsupportedModelError(f"{name} is a {type(layer).__name__}; {SUPPORTED}")
        parts: MegatronModule = layer
        if not isinstance(parts.cross_attention, IdentityOp):
            raise UnsupportedModelError(f"{name} has a {type(parts.cross_attention).__name__}; {SUPPORTED}")
        attention: MegatronModule = parts.self_attention
        if isinstance(attention, IdentityOp):
            continue
        adapter = next((adapt for known, adapt in _ADAPTERS.items() if isinstance(attention, known)), None)
        if adapter is None:
            raise UnsupportedModelError(f"{name} has a {type(attention).__name__}; {SUPPORTED}")
        core = attention.core_attention
        if not _CORES & {base.__name__ for base in type(core).__mro__}:
            raise UnsupportedModelError(
                f"{name}.self_attention.core_attention is a {type(core).__name__}, unknown to the engine; "
                f"supported are {', '.join(sorted(_CORES))}"
            )
        if attention.attn_mask_type not in _CAUSAL:
            raise UnsupportedModelError(
                f"{name} attends with mask {attention.attn_mask_type.name}; {SUPPORTED}"
            )
        config = model.config
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, attention.layer_number
        )
        window = window_of(config, name) if is_windowed else None
        shape = adapter(config, attention, window=window, has_rope=has_rope_to_turn(model))
        yield AttentionSite(layer=parts, attention=attention, shape=shape)


_ADAPTERS: dict[type, Callable[..., LayerShape]] = {
    MLASelfAttention: latent_attention_shape,
    SelfAttention: self_attention_shape,
}


def has_rope_to_turn(model: MegatronModule) -> bool:
    """Says whether the attention backend turns in megatron's stead.

    Not where megatron insists on its own fused kernel, nor for a rotary module of an unknown kind.
    """
    known = type(getattr(model, "rotary_pos_emb", None)) in (RotaryEmbedding, YarnRotaryEmbedding)
    return known and not model.config.fused_single_qkv_rope


def is_dense_layer(layer: MegatronModule) -> bool:
    """Says whether a layer is what `dense_layer` computes, and nothing more."""
    attention, mlp = layer.self_attention, layer.mlp
    norms = {type(layer.input_layernorm), type(layer.pre_mlp_layernorm)}
    if (type(layer), type(attention), type(mlp), norms) != (
        TransformerLayer,
        SelfAttention,
        MLP,
        {nn.RMSNorm},
    ):
        return False
    head_norms = {type(attention.q_layernorm), type(attention.k_layernorm)}
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return (
        head_norms <= {nn.RMSNorm, IdentityOp, type(None)}
        and has_dense_options(layer)
        and all(map(is_sliced_linear, linears))
    )


def is_sliced_linear(module: nn.Module) -> bool:
    """Says whether a linear layer is a rank's part of one, or all of it: a product and at most a bias."""
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return False
    linear: MegatronModule = module
    is_sliced = getattr(linear, "input_is_parallel", True) and not getattr(linear, "gather_output", False)
    return (
        (is_sliced or get_pg_size(linear.tp_group) == 1)
        and linear.gtp_remat_size == 1
        and not linear.config.defer_embedding_wgrad_compute
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Says whether a linear layer is one rank's whole layer."""
    linear: MegatronModule = module
    return is_sliced_linear(module) and get_pg_size(linear.tp_group) == 1
