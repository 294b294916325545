"""What the config.json of each Hugging Face family says beyond what all say, as hyperparameters.

One function a family, named for it. Knows the keys of configs; knows no tensor names and no megatron.
"""

from typing import Any

from msgspec.structs import replace

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Experts
from megallm.models.hf_windows import (
    Fields,
    sliding_layers,
    some_windowed,
    turned_apart,
    window,
    windowed_but_every,
)
from megallm.models.settings_file import Settings


def llama(settings: Settings) -> Fields:
    """Biases, in attention and in the MLP."""
    return {**_biases(settings), "has_mlp_bias": settings.value_or("mlp_bias", False)}


def mistral(settings: Settings) -> Fields:
    """A window, in every layer; Phi-3's, too."""
    return window(settings, range(settings.value("num_hidden_layers", int)))


def mixtral(settings: Settings) -> Fields:
    """Mistral's, and experts."""
    return {**mistral(settings), "experts": _local_experts(settings)}


def qwen2(settings: Settings) -> Fields:
    """Biases of queries, keys and values; a window in some layers."""
    return {"has_qkv_bias": True, **some_windowed(settings)}


def qwen3(settings: Settings) -> Fields:
    """Norms of queries and keys; a window in some layers."""
    return {"has_qk_norm": True, **_biases(settings), **some_windowed(settings)}


def qwen2_moe(settings: Settings) -> Fields:
    """Qwen2's; experts as Qwen3's, and one that all tokens share in part."""
    experts = replace(
        _qwen_experts(settings),
        shared_ffn_size=settings.value("shared_expert_intermediate_size", int),
        has_shared_gate=True,
    )
    has_bias = settings.value_or("qkv_bias", True)
    return {"has_qkv_bias": has_bias, **some_windowed(settings), "experts": experts}


def qwen3_moe(settings: Settings) -> Fields:
    """Qwen3's, the window in all layers; experts, in all layers or some."""
    windows = mistral(settings) if settings.value_or("use_sliding_window", False) else {}
    return {"has_qk_norm": True, **_biases(settings), **windows, "experts": _qwen_experts(settings)}


def olmoe(settings: Settings) -> Fields:
    """Queries are normed as one, and keys; experts in all layers."""
    if settings.has("clip_qkv"):
        raise UnsupportedModelError(
            f"{settings.name_of('clip_qkv')} is {settings.values['clip_qkv']}; supported is null"
        )
    experts = Experts(
        num_experts=settings.value("num_experts", int),
        num_chosen=settings.value("num_experts_per_tok", int),
        ffn_size=settings.value("intermediate_size", int),
        is_renormalised=settings.value_or("norm_topk_prob", False),
    )
    return {**_biases(settings), "has_qk_norm": True, "is_qk_norm_joint": True, "experts": experts}


def glm4_moe(settings: Settings) -> Fields:
    """Biases, norms of queries and keys where the config says; experts scored by sigmoid, a shared one."""
    return {
        "has_qkv_bias": settings.value_or("attention_bias", False),
        "has_qk_norm": settings.value_or("use_qk_norm", False),
        "experts": _sigmoid_experts(settings),
    }


def dots1(settings: Settings) -> Fields:
    """Norms of queries and keys, biases; GLM-4.5's experts."""
    kinds: list[Any] = settings.value_or("layer_types", [])
    windows = window(settings, sliding_layers(settings, kinds))
    return {**_biases(settings), **windows, "has_qk_norm": True, "experts": _sigmoid_experts(settings)}


def gpt_oss(settings: Settings) -> Fields:
    """Biases, sinks, a window in every other layer; experts with biases, and bounds on what they multiply."""
    if settings.value_or("swiglu_alpha", 1.702) != 1.702:  # noqa: PLR2004 - megatron's, and quick GELU's
        raise UnsupportedModelError(
            f"{settings.name_of('swiglu_alpha')} is {settings.values['swiglu_alpha']}; supported is 1.702"
        )
    return {
        **_biases(settings),
        **windowed_but_every(settings, 2),
        "has_sinks": True,
        "activation": "quick_gelu",
        "gate_bound": settings.value_or("swiglu_limit", 7.0),
        "experts": replace(_local_experts(settings), has_bias=True),
    }


def smollm3(settings: Settings) -> Fields:
    """Llama's, and layers without rotary positions, which alone may have a window."""
    num_layers = settings.value("num_hidden_layers", int)
    every = settings.value_or("no_rope_layer_interval", 4)
    turns: list[Any] = settings.value_or(
        "no_rope_layers", [(layer + 1) % every for layer in range(num_layers)]
    )
    unturned = tuple(layer for layer, is_turned in enumerate(turns) if not is_turned)
    if not settings.value_or("use_sliding_window", False):
        windows = {}
    elif settings.has("layer_types"):
        windows = some_windowed(settings)
    else:
        windows = window(settings, list(unturned))
    return {**llama(settings), **windows, "unturned_layers": unturned}


def gemma(settings: Settings) -> Fields:
    """Norms whose weights count from one, GELU, a scaled embedding."""
    return {
        **_biases(settings),
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_factor": settings.value("hidden_size", int) ** 0.5,
    }


def gemma2(settings: Settings) -> Fields:
    """Gemma's; output norms, bounds, another scale of scores, a window in every other layer."""
    return {
        **gemma(settings),
        **windowed_but_every(settings, 2),
        "has_output_norms": True,
        "score_scale": settings.value("query_pre_attn_scalar", float) ** -0.5,
        "score_softcap": _optional(settings, "attn_logit_softcapping"),
        "logit_softcap": _optional(settings, "final_logit_softcapping"),
    }


def gemma3(settings: Settings) -> Fields:
    """Gemma's; output norms, norms of queries and keys, windows in most layers, which turn otherwise."""
    if settings.value_or("use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{settings.name_of('use_bidirectional_attention')} is true: such a model reads and never writes"
        )
    return {  # without a bound on scores, which transformers leaves out whatever the config says
        **gemma(settings),
        **turned_apart(settings, windowed_but_every(settings, 6), "rope_local_base_freq"),
        "has_output_norms": True,
        "has_qk_norm": True,
        "score_scale": settings.value("query_pre_attn_scalar", float) ** -0.5,
        "logit_softcap": _optional(settings, "final_logit_softcapping"),
    }


def glm(settings: Settings) -> Fields:
    """Biases of queries, keys and values; rotary pairs side by side."""
    return {"has_qkv_bias": settings.value_or("attention_bias", True), "is_rope_interleaved": True}


def glm4(settings: Settings) -> Fields:
    """GLM's, and output norms."""
    return {**glm(settings), "has_output_norms": True}


def ernie4_5(settings: Settings) -> Fields:
    """Biases everywhere or nowhere; rotary pairs side by side."""
    return {**_biases_everywhere(settings, otherwise=False), "is_rope_interleaved": True}


def seed_oss(settings: Settings) -> Fields:
    """Llama's, the output projection's bias apart from the others."""
    return {**llama(settings), "has_output_bias": settings.value_or("attention_out_bias", False)}


def granite(settings: Settings) -> Fields:
    """Llama's, and a factor on nearly everything."""
    return {
        **llama(settings),
        "embedding_factor": settings.value_or("embedding_multiplier", 1.0),
        "residual_factor": settings.value_or("residual_multiplier", 1.0),
        "score_scale": settings.value_or("attention_multiplier", 1.0),
        "logit_factor": 1 / settings.value_or("logits_scaling", 1.0),
    }


def starcoder2(settings: Settings) -> Fields:
    """Mistral's; layer norms, an MLP without a gate, biases everywhere or nowhere."""
    return {
        **mistral(settings),
        **_biases_everywhere(settings, otherwise=True),
        "norm": "layer",
        "norm_epsilon": settings.value_or("norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "has_gate": False,
    }


def olmo2(settings: Settings) -> Fields:
    """Norms of what attention and MLP give and not of what they take; queries are normed as one, and keys."""
    return {
        **_biases(settings),
        "has_input_norms": False,
        "has_output_norms": True,
        "has_qk_norm": True,
        "is_qk_norm_joint": True,
    }


def olmo3(settings: Settings) -> Fields:
    """OLMo-2's; windows in most layers, whose rotary frequencies are not scaled."""
    return {**olmo2(settings), **turned_apart(settings, windowed_but_every(settings, 4), "rope_theta")}


def exaone4(settings: Settings) -> Fields:
    """OLMo-2's norms, but head by head; windows in most layers, and no rotary positions in the others."""
    windows = windowed_but_every(settings, 4)
    unturned = set(range(settings.value("num_hidden_layers", int))) - {*windows.get("windowed_layers", ())}
    return {
        **windows,
        "unturned_layers": tuple(sorted(unturned)) if settings.has("sliding_window") else (),
        "has_input_norms": False,
        "has_output_norms": True,
        "has_qk_norm": True,
    }


def _biases(settings: Settings) -> Fields:
    has_bias = settings.value_or("attention_bias", False)
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias}


def _biases_everywhere(settings: Settings, *, otherwise: bool) -> Fields:
    """Gives the biases of a family that has them everywhere or nowhere; `otherwise`: where it doesn't say."""
    has_bias = settings.value_or("use_bias", otherwise)
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias, "has_mlp_bias": has_bias}


def _local_experts(settings: Settings) -> Experts:
    return Experts(
        num_experts=settings.value("num_local_experts", int),
        num_chosen=settings.value("num_experts_per_tok", int),
        ffn_size=settings.value("intermediate_size", int),
        is_renormalised=True,
    )


def _sigmoid_experts(settings: Settings) -> Experts:
    num_chosen = settings.value("num_experts_per_tok", int)
    is_renormalised = settings.value_or("norm_topk_prob", True) and num_chosen > 1  # megatron's rule
    if not is_renormalised or settings.value_or("n_group", 1) != 1:
        raise UnsupportedModelError(
            f"{settings.path}: of experts scored by sigmoid, supported are norm_topk_prob true, n_group 1, "
            "and num_experts_per_tok of 2 or more"
        )
    ffn_size = settings.value("moe_intermediate_size", int)
    return Experts(
        num_experts=settings.value("n_routed_experts", int),
        num_chosen=num_chosen,
        ffn_size=ffn_size,
        is_renormalised=True,
        dense_layers=tuple(range(settings.value("first_k_dense_replace", int))),
        shared_ffn_size=ffn_size * settings.value("n_shared_experts", int),
        scoring="sigmoid",
        share_factor=settings.value_or("routed_scaling_factor", 1.0),
    )


def _qwen_experts(settings: Settings) -> Experts:
    spacing = settings.value_or("decoder_sparse_step", 1)
    dense: list[Any] = settings.value_or("mlp_only_layers", [])
    num_layers = settings.value("num_hidden_layers", int)
    return Experts(
        num_experts=settings.value(
            "num_experts" if settings.has("num_experts") else "num_local_experts", int
        ),
        num_chosen=settings.value("num_experts_per_tok", int),
        ffn_size=settings.value("moe_intermediate_size", int),
        is_renormalised=settings.value_or("norm_topk_prob", False),
        dense_layers=tuple(
            layer for layer in range(num_layers) if layer in dense or (layer + 1) % max(spacing, 1)
        ),
    )


def _optional(settings: Settings, key: str) -> float | None:
    return settings.value(key, float) if settings.has(key) else None
