"""The config.json of a Hugging Face folder as hyperparameters.

Knows the keys that all families have, old and new spellings of them; what one family says beyond
them is in hf_fields.py.
"""

import math
from typing import Any, Final

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Hyperparameters, RopeScaling
from megallm.models.hf_families import Family
from megallm.models.settings_file import Settings

_PLAIN: Final = ("default", "none")
_SCALED: Final = ("linear", "llama3", "yarn", "dynamic", "longrope", "su")
"""The last is the old name of the one before it."""


def hyperparameters(config: Settings, family: Family) -> Hyperparameters:
    """Gives the numbers of a config.

    Raises: UnsupportedModelError for what such a decoder has not, ModelFileError for a damaged file.
    """
    settings = family.settings(config)
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
        "rotary_base": rope.value_or("rope_theta", settings.value_or("rope_theta", 10_000.0)),
        "norm_epsilon": settings.value_or("rms_norm_eps", 1e-6),
        "is_tied": settings.value_or("tie_word_embeddings", False),
        "rotary_dim": None if partial == 1.0 else int(head_dim * partial),
        "rope_scaling": _scaling(rope, settings),
    }
    size = Hyperparameters(**(fields | family.fields(settings)))
    size.check(settings.path)
    return size


def _refuse_options(settings: Settings, family: Family) -> None:
    key = "hidden_activation" if settings.has("hidden_activation") else "hidden_act"
    activation = settings.value_or(key, family.activations[0])
    if activation not in family.activations:
        raise UnsupportedModelError(
            f"{settings.name_of(key)} is {activation!r}, supported is {family.activations[0]}"
        )


def _rope(settings: Settings) -> Settings:
    """Gives the rotary settings: one object since transformers 5, `rope_scaling` before.

    Where kinds of layers turn differently it has one object for each kind.
    """
    rope = settings.inside("rope_parameters" if settings.has("rope_parameters") else "rope_scaling")
    return rope.inside("full_attention") if rope.has("full_attention") else rope


def _scaling(rope: Settings, settings: Settings) -> RopeScaling | None:
    kind = rope.value_or("rope_type", rope.value_or("type", "default"))
    if kind in _PLAIN:
        return None
    if kind not in _SCALED:
        raise UnsupportedModelError(
            f"{rope.name_of('rope_type')} is {kind!r}; supported are default, {', '.join(_SCALED)}"
        )
    positions = settings.value("max_position_embeddings", int)
    original = settings.value_or(
        "original_max_position_embeddings", rope.value_or("original_max_position_embeddings", positions)
    )
    if kind in {"longrope", "su"}:
        return _longrope(rope, original=original, growth=positions / original)
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
        case "dynamic":  # goes by what the config says of the whole, as transformers does
            return RopeScaling(kind="dynamic", factor=factor, original_positions=positions)
        case _:
            return RopeScaling(kind="linear", factor=factor)


def _longrope(rope: Settings, *, original: int, growth: float) -> RopeScaling:
    factor = rope.value_or("factor", growth)
    plain = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="factors",
        divisors=tuple(rope.numbers("short_factor")),
        long_divisors=tuple(rope.numbers("long_factor")),
        original_positions=original,
        attention_factor=rope.value_or("attention_factor", plain),
    )


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
