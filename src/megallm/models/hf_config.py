"""The config.json of a Hugging Face folder as hyperparameters.

Knows the keys that all families have, old and new spellings of them; what one family has beyond them
is in hf_families.py.
"""

import math
from typing import Any, Final

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Hyperparameters, RopeScaling
from megallm.models.hf_families import Family
from megallm.models.settings_file import Settings

_PLAIN: Final = ("default", "none")
_SCALED: Final = ("linear", "llama3", "yarn")
_REFUSED_ROPE: Final = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "its frequencies change with the length of the text",
    "su": "its frequencies change with the length of the text",
}


def hyperparameters(settings: Settings, family: Family) -> Hyperparameters:
    """Gives the numbers of a config.

    Raises: UnsupportedModelError for what such a decoder has not, ModelFileError for a damaged file.
    """
    _refuse_options(settings, family)
    num_heads = settings.value("num_attention_heads", int)
    hidden_size = settings.value("hidden_size", int)
    rope = _rope(settings)
    head_dim = settings.value_or("head_dim", hidden_size // max(num_heads, 1))
    partial = rope.value_or("partial_rotary_factor", settings.value_or("partial_rotary_factor", 1.0))
    fields: dict[str, Any] = {  # Any: of Hyperparameters
        "num_layers": settings.value("num_hidden_layers", int),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": settings.value_or("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "ffn_size": settings.value("intermediate_size", int),
        "vocab_size": settings.value("vocab_size", int),
        "max_positions": settings.value("max_position_embeddings", int),
        "rotary_base": rope.value_or("rope_theta", settings.value_or("rope_theta", family.rotary_base)),
        "norm_epsilon": settings.value_or("rms_norm_eps", family.norm_epsilon),
        "is_tied": settings.value_or("tie_word_embeddings", family.is_tied),
        "rotary_dim": None if partial == 1.0 else int(head_dim * partial),
        "rope_scaling": _scaling(rope, settings),
    }
    size = Hyperparameters(**(fields | family.fields(settings)))
    size.check(settings.path)
    return size


def _refuse_options(settings: Settings, family: Family) -> None:
    if settings.has("quantization_config"):
        method = settings.inside("quantization_config").values.get("quant_method")
        raise UnsupportedModelError(
            f"{settings.name_of('quantization_config')} says that the weights are quantised ({method}); use "
            "the model's unquantised folder"
        )
    key = "hidden_activation" if settings.has("hidden_activation") else "hidden_act"
    activation = settings.value_or(key, family.activations[0])
    if activation not in family.activations:
        raise UnsupportedModelError(
            f"{settings.name_of(key)} is {activation!r}, supported is {family.activations[0]}"
        )


def _rope(settings: Settings) -> Settings:
    """Gives the rotary settings: one object since transformers 5, `rope_scaling` before."""
    return settings.inside("rope_parameters" if settings.has("rope_parameters") else "rope_scaling")


def _scaling(rope: Settings, settings: Settings) -> RopeScaling | None:
    kind = rope.value_or("rope_type", rope.value_or("type", "default"))
    if kind in _PLAIN:
        return None
    if kind not in _SCALED:
        why = _REFUSED_ROPE.get(kind, "it is unknown here")
        raise UnsupportedModelError(
            f"{rope.name_of('rope_type')} is {kind!r}: {why}; supported are default, {', '.join(_SCALED)}"
        )
    positions = settings.value("max_position_embeddings", int)
    original = rope.value_or("original_max_position_embeddings", positions)
    factor = rope.value("factor", float)
    match kind:
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=factor,
                original_positions=original,
                low_frequency_factor=rope.value("low_freq_factor", float),
                high_frequency_factor=rope.value("high_freq_factor", float),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_positions=original,
                fast_rotations=rope.value_or("beta_fast", 32.0),
                slow_rotations=rope.value_or("beta_slow", 1.0),
                is_truncated=rope.value_or("truncate", True),
                attention_factor=_attention_factor(rope, factor),
            )
        case _:
            return RopeScaling(kind="linear", factor=factor)


def _attention_factor(rope: Settings, factor: float) -> float:
    """Gives what cosines and sines are multiplied by: as YaRN's paper has it, unless the config says more."""
    if rope.has("attention_factor"):
        return rope.value("attention_factor", float)
    weights = rope.value_or("mscale", 0.0), rope.value_or("mscale_all_dim", 0.0)
    if not all(weights):
        return _growth(factor, 1.0)
    return _growth(factor, weights[0]) / _growth(factor, weights[1])


def _growth(factor: float, weight: float) -> float:
    """Gives the rule of thumb for how much scores grow with the context (Peng et al., 2023, equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
