"""Hyperparameters as megatron-core's TransformerConfig and layer specs, plain torch throughout.

Knows megatron's options and its local specs (no Transformer Engine); knows no file and no weights.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any, Final

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn.functional import gelu, silu

from megallm.models.checkpoint import Hyperparameters
from megallm.models.rank_part import Sizes

SCORE_SOFTCAP: Final = "attn_logit_softcapping"
"""The field that a config has for a bound on scores: megatron-core has none, its bridge this one."""


_SIGMOID_OPTIONS: Final = {"moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
"""Of a router that scores by sigmoid: models that have one compute it in float32."""


def transformer_config(
    size: Hyperparameters, ranks: Sizes, dtype: torch.dtype, *, is_on_cpu: bool, is_hybrid: bool = False
) -> TransformerConfig:
    """Gives the config; a hybrid model has two of its layers, attention and MLP, for each of ours.

    Unless ours are those of one themselves.
    """
    has_pairs = is_hybrid and size.layer_kinds is None
    config = TransformerConfig(
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        expert_model_parallel_size=ranks.ep,
        expert_tensor_parallel_size=ranks.etp,
        num_layers=size.num_layers * (2 if has_pairs else 1),
        hidden_size=size.hidden_size,
        num_attention_heads=size.num_heads,
        num_query_groups=size.num_kv_heads,
        kv_channels=size.head_dim,
        ffn_hidden_size=size.ffn_size,
        normalization="RMSNorm" if size.norm == "rms" else "LayerNorm",
        layernorm_epsilon=size.norm_epsilon,
        qk_layernorm=size.has_qk_norm,
        activation_func=_ACTIVATIONS[size.activation],
        activation_func_clamp_value=size.gate_bound,
        glu_linear_offset=0.0 if size.gate_bound is None else 1.0,
        softmax_type="learnable" if size.has_sinks else "vanilla",
        softmax_scale=size.score_scale,
        gated_linear_unit=size.has_gate,
        rotary_interleaved=size.is_rope_interleaved,
        add_bias_linear=size.has_output_bias or size.has_mlp_bias or _has_expert_bias(size),
        add_qkv_bias=size.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=is_on_cpu,
        perform_initialization=False,
        # torch.compile'd or CUDA-only versions of what the local spec does in plain torch
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_layer_options(size, has_pairs=has_pairs),
        **_expert_options(size),
    )
    if size.score_softcap is not None:
        setattr(config, SCORE_SOFTCAP, size.score_softcap)
    return config


def gpt_spec(size: Hyperparameters, config: TransformerConfig) -> Any:  # Any: one of two specs
    """Gives the layers of a GPTModel: one spec for all, or one for each where kinds differ."""
    if size.experts is not None and size.experts.dense_layers:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return _layer_spec(size)


def hybrid_spec(size: Hyperparameters) -> ModuleSpec:
    """Gives the three kinds of layer that a HybridModel may have here: attention, MLP, experts."""
    dense, mixed = _layer_spec(size, has_experts=False).submodules, _layer_spec(size).submodules
    kinds = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=dense.input_layernorm,
                self_attention=dense.self_attention,
                self_attn_bda=dense.self_attn_bda,
            ),
        ),
        mlp_layer=_mlp_spec(MLPLayer, dense),
        moe_layer=_mlp_spec(TransformerLayer, mixed),
    )
    return ModuleSpec(module=HybridStack, submodules=kinds)


def hybrid_pattern(size: Hyperparameters, num_stages: int = 1) -> str:
    """Gives the kinds of a HybridModel's layers: `*` attention, `-` an MLP, `E` experts; `|` parts stages."""
    pairs = ["*E" if size.has_experts(layer) else "*-" for layer in range(size.num_layers)]
    kinds = pairs if size.layer_kinds is None else list(size.layer_kinds)
    each = size.num_layers // num_stages
    return "|".join("".join(kinds[first : first + each]) for first in range(0, size.num_layers, each))


def _gelu_tanh(gate: Tensor) -> Tensor:
    return gelu(gate, approximate="tanh")


def _quick_gelu(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: Final = {"silu": silu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu}


def _has_expert_bias(size: Hyperparameters) -> bool:
    return size.experts is not None and size.experts.has_bias


def _layer_spec(size: Hyperparameters, *, has_experts: bool = True) -> Any:  # Any: untyped specs
    spec: Any = get_gpt_layer_local_spec(  # Any: the same
        num_experts=size.experts.num_experts if size.experts is not None and has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=size.has_qk_norm,
        normalization="RMSNorm",
    )
    if not size.has_input_norms:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    return spec


def _mlp_spec(layer: type, local: Any) -> ModuleSpec:  # Any: the same
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda
        ),
    )


def _layer_options(size: Hyperparameters, *, has_pairs: bool) -> dict[str, Any]:  # Any: options
    """Gives what differs from layer to layer, as megatron's lists of ones and zeros."""
    options: dict[str, Any] = {}
    if size.unturned_layers:
        options["no_rope_freq"] = _marks(size, size.unturned_layers, has_pairs=has_pairs)
    if size.window is not None and size.windowed_layers:
        options["window_size"] = (size.window, 0)
        options["window_attn_skip_freq"] = _marks(size, size.windowed_layers, has_pairs=has_pairs)
    return options


def _marks(size: Hyperparameters, layers: tuple[int, ...], *, has_pairs: bool) -> list[int]:
    marks = [int(layer in layers) for layer in range(size.num_layers)]
    return [mark for mark in marks for _ in range(2)] if has_pairs else marks


def _expert_options(size: Hyperparameters) -> dict[str, Any]:  # Any: options
    if size.experts is None:
        return {}
    return {
        "num_moe_experts": size.experts.num_experts,
        "moe_router_topk": size.experts.num_chosen,
        "moe_ffn_hidden_size": size.experts.ffn_size,
        "moe_layer_freq": [int(size.has_experts(layer)) for layer in range(size.num_layers)],
        # a softmax over the chosen alone is the renormalised softmax over all
        "moe_router_pre_softmax": not size.experts.is_renormalised,
        "moe_router_score_function": size.experts.scoring,
        **(_SIGMOID_OPTIONS if size.experts.scoring == "sigmoid" else {}),
        "moe_router_topk_scaling_factor": None
        if size.experts.share_factor == 1.0
        else size.experts.share_factor,
        "moe_shared_expert_intermediate_size": size.experts.shared_ffn_size or None,
        "moe_shared_expert_gate": size.experts.has_shared_gate,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }
