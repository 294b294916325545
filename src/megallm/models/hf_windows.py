"""Which layers of a Hugging Face config have a window, and how those turn.

Families say it by the kinds of their layers, by a pattern, by a number of layers, or by nothing. Knows the
keys of configs; knows no family.
"""

from typing import Any, Final

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.settings_file import Settings

type Fields = dict[str, Any]  # of Hyperparameters

_SLIDING: Final = "sliding_attention"
_LAYER_KINDS: Final = ("full_attention", _SLIDING)


def window(settings: Settings, layers: range | list[int]) -> Fields:
    """Gives the window of some layers; transformers counts a query's own token, too."""
    if not settings.has("sliding_window") or not layers:
        return {}
    return {"window": settings.value("sliding_window", int) - 1, "windowed_layers": tuple(layers)}


def some_windowed(settings: Settings) -> Fields:
    """Reads the window of families that say of each layer whether it has one, or from which layer on."""
    if not settings.value_or("use_sliding_window", False):
        return {}
    num_layers = settings.value("num_hidden_layers", int)
    if not settings.has("layer_types"):
        return window(settings, range(settings.value_or("max_window_layers", 28), num_layers))
    return window(settings, sliding_layers(settings, settings.value("layer_types", list)))


def windowed_but_every(settings: Settings, every: int) -> Fields:
    """Reads the window of families where one layer of `every` has none, unless the config says otherwise."""
    if settings.has("layer_types"):
        kinds: list[Any] = settings.value("layer_types", list)
    elif settings.has("sliding_window"):
        every = max(1, settings.value_or("sliding_window_pattern", every))
        layers = range(1, settings.value("num_hidden_layers", int) + 1)
        kinds = [_LAYER_KINDS[layer % every > 0] for layer in layers]
    else:
        return {}
    return window(settings, sliding_layers(settings, kinds))


def sliding_layers(settings: Settings, kinds: list[Any]) -> list[int]:
    """Gives the layers whose kind is one with a window.

    Raises: UnsupportedModelError for a kind that is not known.
    """
    unknown = sorted({str(kind) for kind in kinds if kind not in _LAYER_KINDS})
    if unknown:
        raise UnsupportedModelError(
            f"{settings.name_of('layer_types')} has {unknown}, supported are {', '.join(_LAYER_KINDS)}"
        )
    return [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]


def turned_apart(settings: Settings, windows: Fields, old_key: str) -> Fields:
    """Gives layers with a window, if there are any, the rotary base that is theirs alone.

    `old_key` is where it was before transformers 5. Raises: UnsupportedModelError where it is scaled, too.
    """
    if not windows:
        return {}
    rope = settings.inside("rope_parameters").inside(_SLIDING)
    kind = rope.value_or("rope_type", "default")
    if kind != "default":
        raise UnsupportedModelError(
            f"{rope.name_of('rope_type')} is {kind!r}; supported for layers with a window is default"
        )
    base = rope.value_or("rope_theta", settings.value(old_key, float))
    return {**windows, "windowed_rotary_base": base}
