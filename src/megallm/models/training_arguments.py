"""The training arguments that megatron stores beside its weights, as hyperparameters.

Knows the arguments' names, and the letters of a HybridModel's layers; knows no file and no weights.
"""

from typing import Any, Final, Literal

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Experts, Hyperparameters, RopeScaling
from megallm.models.settings_file import Settings

_NEEDED: Final = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "multi_latent_attention": False,
    "rotary_interleaved": False,
    "layernorm_zero_centered_gamma": False,
    "apply_layernorm_1p": False,
    "moe_router_group_topk": None,
    "mtp_num_layers": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "rotary_seq_len_interpolation_factor": None,
}
"""Training arguments that such a decoder has one value of."""

_PATTERNS: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""A HybridModel's layers, one letter each, by the name of today and an older one."""
_ATTENTION: Final = "*"
_MLP: Final = "-"
_EXPERTS: Final = "E"
_OTHER_KINDS: Final = {
    "M": "a Mamba layer",
    "G": "a Gated DeltaNet layer",
    "D": "sparse attention",
    "+": "multi-latent attention",
    "/": "multi-token prediction",
}


def hyperparameters_of(arguments: Settings) -> Hyperparameters:
    """Gives the numbers that training arguments call for.

    Raises: UnsupportedModelError naming an argument that such a decoder has not.
    """
    for name, needed in _NEEDED.items():
        found = arguments.values.get(name, needed)
        if found != needed:
            raise UnsupportedModelError(
                f"{arguments.name_of(name)} is {found!r}, supported is {needed!r}; build the megatron-core "
                "model yourself and pass it to MegatronLLM"
            )
    num_heads = arguments.value("num_attention_heads", int)
    hidden_size = arguments.value("hidden_size", int)
    kinds = _layer_kinds(arguments)
    num_layers = arguments.value("num_layers", int) if kinds is None else len(kinds)
    head_dim = arguments.value_or("kv_channels", hidden_size // max(num_heads, 1))
    is_grouped = arguments.value_or("group_query_attention", False)
    percent = arguments.value_or("rotary_percent", 1.0)
    has_bias = arguments.value_or("add_bias_linear", False)
    size = Hyperparameters(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=arguments.value("num_query_groups", int) if is_grouped else num_heads,
        head_dim=head_dim,
        ffn_size=arguments.value("ffn_hidden_size", int),
        vocab_size=arguments.value("padded_vocab_size", int),
        max_positions=arguments.value("max_position_embeddings", int),
        rotary_base=arguments.value_or("rotary_base", 10_000.0),
        norm_epsilon=arguments.value_or("norm_epsilon", 1e-5),
        is_tied=not arguments.value_or("untie_embeddings_and_output_weights", False),
        rotary_dim=None if percent == 1.0 else int(head_dim * percent),
        rope_scaling=_scaling(arguments),
        unturned_layers=_unturned(arguments, num_layers),
        layer_kinds=kinds,
        has_qkv_bias=has_bias or arguments.value_or("add_qkv_bias", False),
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        has_qk_norm=arguments.value_or("qk_layernorm", False),
        experts=_experts(arguments, num_layers, kinds),
        **_window(arguments, num_layers, kinds),
    )
    size.check(arguments.path)
    return size


def _layer_kinds(arguments: Settings) -> str | None:
    """Gives the letters of a HybridModel's layers, None for a GPTModel."""
    name = next((name for name in _PATTERNS if arguments.has(name)), None)
    if name is None:
        return None
    pattern = arguments.value(name, str)
    kinds = pattern.replace("|", "")  # between the stages of a pipeline
    for layer, kind in enumerate(kinds):
        if kind not in {_ATTENTION, _MLP, _EXPERTS}:
            what = _OTHER_KINDS.get(kind, f"{kind!r}, which is unknown here")
            raise UnsupportedModelError(
                f"{arguments.name_of(name)} is {pattern!r}: layer {layer} is {what}; supported are attention "
                "(*), MLP (-) and experts (E)"
            )
    if _ATTENTION not in kinds:
        raise UnsupportedModelError(
            f"{arguments.name_of(name)} is {pattern!r}, supported is one with attention (*) in it"
        )
    return kinds


def _scaling(arguments: Settings) -> RopeScaling | None:
    """Gives megatron's --use-rope-scaling, whose other numbers are fixed."""
    if not arguments.value_or("use_rope_scaling", False):
        return None
    factor = arguments.value_or("rope_scaling_factor", 8.0)
    return RopeScaling(kind="llama3", factor=factor, original_positions=8192)


def _window(
    arguments: Settings, num_layers: int, kinds: str | None
) -> dict[str, Any]:  # Any: fields of Hyperparameters
    if not arguments.has("window_size"):
        return {}
    before, after = arguments.values["window_size"]
    if after > 0 or before < 0:
        raise UnsupportedModelError(
            f"{arguments.name_of('window_size')} is {(before, after)}, supported is one that looks back alone"
        )
    if arguments.has("window_attn_skip_freq"):
        found = arguments.values["window_attn_skip_freq"]
        # a number n leaves each n-th layer without a window; a list marks the layers that have one
        layers = [layer for layer in range(num_layers) if _is_windowed(found, layer)]
    else:
        layers = list(range(num_layers))
    attending = (layer for layer in layers if kinds is None or kinds[layer] == _ATTENTION)
    return {"window": before, "windowed_layers": tuple(attending)}


def _is_windowed(skip: Any, layer: int) -> bool:  # Any: a number, or a list of marks
    return bool(skip[layer]) if isinstance(skip, list) else (layer + 1) % skip != 0


def _unturned(arguments: Settings, num_layers: int) -> tuple[int, ...]:
    """Gives the layers without rotary positions: all, or those of a list of ones and zeros, or each n-th."""
    positions = arguments.values.get("position_embedding_type", "rope")
    if positions not in {"rope", "none"}:
        raise UnsupportedModelError(
            f"{arguments.name_of('position_embedding_type')} is {positions!r}, supported is rope or none; "
            "build the megatron-core model yourself and pass it to MegatronLLM"
        )
    if positions == "none":
        return tuple(range(num_layers))
    found = arguments.values.get("no_rope_freq")
    if not found:
        return ()
    marks = (
        found if isinstance(found, list) else [int((layer + 1) % found == 0) for layer in range(num_layers)]
    )
    return tuple(layer for layer, mark in enumerate(marks) if mark)


def _experts(arguments: Settings, num_layers: int, kinds: str | None) -> Experts | None:
    if kinds is not None:
        pattern = [int(kind == _EXPERTS) for kind in kinds]
        if not any(pattern):
            return None
    elif not arguments.has("num_experts"):
        return None
    else:
        pattern = arguments.values.get("moe_layer_freq", 1)
    if not isinstance(pattern, int | list):
        raise UnsupportedModelError(
            f"{arguments.name_of('moe_layer_freq')} is {pattern!r}, supported is a number or a list"
        )
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
    return Experts(
        num_experts=arguments.value("num_experts", int),
        num_chosen=arguments.value_or("moe_router_topk", 2),
        ffn_size=arguments.value_or("moe_ffn_hidden_size", arguments.value("ffn_hidden_size", int)),
        is_renormalised=not arguments.value_or("moe_router_pre_softmax", False),
        dense_layers=tuple(layer for layer, mark in enumerate(pattern) if not int(mark)),
        shared_ffn_size=arguments.value_or("moe_shared_expert_intermediate_size", 0),
        has_shared_gate=arguments.value_or("moe_shared_expert_gate", False),
        scoring=_scoring(arguments),
        share_factor=arguments.value_or("moe_router_topk_scaling_factor", 1.0),
    )


def _scoring(arguments: Settings) -> Literal["softmax", "sigmoid"]:
    scoring = arguments.value_or("moe_router_score_function", "softmax")
    has_bias = arguments.value_or("moe_router_enable_expert_bias", False)
    if scoring == "softmax" and not has_bias:
        return "softmax"
    if scoring == "sigmoid" and has_bias:
        return "sigmoid"
    raise UnsupportedModelError(
        f"{arguments.name_of('moe_router_score_function')} is {scoring!r} and moe_router_enable_expert_bias "
        f"{has_bias}; supported is softmax without the bias, or sigmoid with it"
    )
