"""Hugging Face's families of decoders: how each one's config.json and tensor names differ from Llama's.

A family is one entry of `FAMILIES`; what its config says beyond Llama's is one function here. Knows
Hugging Face's names; knows no file format and no megatron.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Experts
from megallm.models.settings_file import Settings

type Fields = dict[str, Any]  # of Hyperparameters

_SLIDING: Final = "sliding_attention"
_LAYER_KINDS: Final = ("full_attention", _SLIDING)


class Family(Struct, frozen=True, kw_only=True):
    """One family: what its config means where it says nothing, and what it has that Llama has not."""

    name: str
    fields: Callable[[Settings], Fields]
    """The hyperparameters beyond those that every family has."""
    is_tied: bool = False
    """Where the config does not say."""
    rotary_base: float = 10_000.0
    """The same."""
    norm_epsilon: float = 1e-6
    """The same."""
    activations: tuple[str, ...] = ("silu", "swish")
    """Names of the one that is run."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names: ours, and what the folder has in its place, in the order of replacing."""
    stacked: Mapping[str, tuple[str, ...]] = {}
    """Tensors of a layer that hold several of ours, one below the other."""


def family_of(settings: Settings) -> Family:
    """Gives the family of a config by its architecture.

    Raises: UnsupportedModelError naming the architecture and those that are supported.
    """
    names: list[Any] = settings.value_or("architectures", [])
    known = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if known is None:
        raise UnsupportedModelError(
            f"{settings.name_of('architectures')} is {names}, supported are {', '.join(FAMILIES)}; build the "
            "megatron-core model yourself and pass it to MegatronLLM"
        )
    return known


def _biases(settings: Settings) -> Fields:
    has_bias = settings.value_or("attention_bias", False)
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias}


def _llama(settings: Settings) -> Fields:
    return {**_biases(settings), "has_mlp_bias": settings.value_or("mlp_bias", False)}


def _window(settings: Settings, layers: range | list[int]) -> Fields:
    """Gives the window of some layers; transformers counts a query's own token, too."""
    if not settings.has("sliding_window") or not layers:
        return {}
    return {"window": settings.value("sliding_window", int) - 1, "windowed_layers": tuple(layers)}


def _all_windowed(settings: Settings) -> Fields:
    return _window(settings, range(settings.value("num_hidden_layers", int)))


def _some_windowed(settings: Settings) -> Fields:
    """Reads the window of families that say of each layer whether it has one, or from which layer on."""
    if not settings.value_or("use_sliding_window", False):
        return {}
    num_layers = settings.value("num_hidden_layers", int)
    if not settings.has("layer_types"):
        return _window(settings, range(settings.value_or("max_window_layers", 28), num_layers))
    kinds: list[Any] = settings.value("layer_types", list)
    unknown = sorted({str(kind) for kind in kinds if kind not in _LAYER_KINDS})
    if unknown:
        raise UnsupportedModelError(
            f"{settings.name_of('layer_types')} has {unknown}, supported are {', '.join(_LAYER_KINDS)}"
        )
    return _window(settings, [layer for layer, kind in enumerate(kinds) if kind == _SLIDING])


def _qwen2(settings: Settings) -> Fields:
    return {"has_qkv_bias": True, **_some_windowed(settings)}


def _qwen3(settings: Settings) -> Fields:
    head_dim = settings.value_or("head_dim", 128)
    return {"head_dim": head_dim, "has_qk_norm": True, **_biases(settings), **_some_windowed(settings)}


def _qwen3_moe(settings: Settings) -> Fields:
    windows = _all_windowed(settings) if settings.value_or("use_sliding_window", False) else {}
    spacing = settings.value_or("decoder_sparse_step", 1)
    dense: list[Any] = settings.value_or("mlp_only_layers", [])
    num_layers = settings.value("num_hidden_layers", int)
    experts = Experts(
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
    return {"has_qk_norm": True, **_biases(settings), **windows, "experts": experts}


def _mixtral(settings: Settings) -> Fields:
    experts = Experts(
        num_experts=settings.value("num_local_experts", int),
        num_chosen=settings.value("num_experts_per_tok", int),
        ffn_size=settings.value("intermediate_size", int),
        is_renormalised=True,
    )
    return {**_all_windowed(settings), "experts": experts}


def _smollm3(settings: Settings) -> Fields:
    num_layers = settings.value("num_hidden_layers", int)
    every = settings.value_or("no_rope_layer_interval", 4)
    turns: list[Any] = settings.value_or(
        "no_rope_layers", [(layer + 1) % every for layer in range(num_layers)]
    )
    unturned = tuple(layer for layer, is_turned in enumerate(turns) if not is_turned)
    if not settings.value_or("use_sliding_window", False):
        windows = {}
    elif settings.has("layer_types"):
        windows = _some_windowed(settings)
    else:
        windows = _window(settings, list(unturned))
    return {**_llama(settings), **windows, "unturned_layers": unturned}


def _gemma2(settings: Settings) -> Fields:
    num_layers = settings.value("num_hidden_layers", int)
    hidden_size = settings.value("hidden_size", int)
    alternating = {"layer_types": [_LAYER_KINDS[(layer + 1) % 2] for layer in range(num_layers)]}
    layers = Settings(settings.path, alternating | settings.values | {"use_sliding_window": True})
    return {
        **_biases(settings),
        **_some_windowed(layers),
        "head_dim": settings.value_or("head_dim", 256),
        "has_output_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_factor": hidden_size**0.5,
        "score_scale": settings.value_or("query_pre_attn_scalar", 256.0) ** -0.5,
        "score_softcap": _optional(settings, "attn_logit_softcapping", 50.0),
        "logit_softcap": _optional(settings, "final_logit_softcapping", 30.0),
    }


def _optional(settings: Settings, key: str, default: float) -> float | None:
    """Gives a number that null turns off, and its default where the key is absent."""
    if key in settings.values and not settings.has(key):
        return None
    return settings.value_or(key, default)


FAMILIES: Final = {
    "LlamaForCausalLM": Family(name="llama", fields=_llama),
    "MistralForCausalLM": Family(name="mistral", fields=_all_windowed),
    "Qwen2ForCausalLM": Family(name="qwen2", fields=_qwen2),
    "Qwen3ForCausalLM": Family(name="qwen3", fields=_qwen3),
    "Qwen3MoeForCausalLM": Family(name="qwen3_moe", fields=_qwen3_moe),
    "MixtralForCausalLM": Family(
        name="mixtral",
        fields=_mixtral,
        rotary_base=1_000_000.0,
        norm_epsilon=1e-5,
        renamed=(
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
    ),
    "Gemma2ForCausalLM": Family(
        name="gemma2",
        fields=_gemma2,
        is_tied=True,
        activations=("gelu_pytorch_tanh",),
        renamed=(
            (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
            (".attention_output_norm.", ".post_attention_layernorm."),
            (".mlp_output_norm.", ".post_feedforward_layernorm."),
        ),
    ),
    "SmolLM3ForCausalLM": Family(name="smollm3", fields=_smollm3, is_tied=True, rotary_base=2_000_000.0),
    "Phi3ForCausalLM": Family(
        name="phi3",
        fields=_all_windowed,
        norm_epsilon=1e-5,
        stacked={
            "self_attn.qkv_proj.weight": (
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
            ),
            "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        },
    ),
}
"""By the name of transformers' class, as config.json has it under `architectures`."""
