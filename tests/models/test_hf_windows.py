"""Windows out of configs, key by key; each family's own are in test_hf_fields.py."""

from pathlib import Path
from typing import Any

import pytest

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.hf_windows import some_windowed, turned_apart, window, windowed_but_every
from megallm.models.settings_file import Settings

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {"num_hidden_layers": 3, "sliding_window": 8}


def settings(**values: Any) -> Settings:  # Any: JSON
    """Gives a config of three layers."""
    return Settings(Path("config.json"), SIZES | values)


def test_a_window_is_counted_without_the_query_s_own_token() -> None:
    """As megatron counts; and no window, or no layer that has it, is nothing to be said."""
    assert window(settings(), [1]) == {"window": 7, "windowed_layers": (1,)}
    assert window(settings(sliding_window=None), [1]) == window(settings(), []) == {}


def test_windows_that_have_to_be_turned_on_are_in_the_last_layers_or_where_the_kinds_say() -> None:
    """Qwen's configs name a window that nobody uses."""
    assert some_windowed(settings()) == some_windowed(settings(layer_types=KINDS)) == {}
    assert some_windowed(settings(use_sliding_window=True)) == {}  # from the 29th layer on
    last = some_windowed(settings(use_sliding_window=True, max_window_layers=1))
    assert last["windowed_layers"] == (1, 2)
    said = some_windowed(settings(use_sliding_window=True, max_window_layers=1, layer_types=KINDS))
    assert said["windowed_layers"] == (0, 2)


def test_a_pattern_of_one_or_none_leaves_no_layer_a_window() -> None:
    """Some writers have 0 for a model that has no windows."""
    assert windowed_but_every(settings(), 2)["windowed_layers"] == (0, 2)
    for pattern in (0, 1):
        assert windowed_but_every(settings(sliding_window_pattern=pattern), 2) == {}
    with pytest.raises(UnsupportedModelError, match=r"layer_types has \['chunked'\], supported are full_att"):
        windowed_but_every(settings(layer_types=["chunked"]), 2)


def test_windowed_layers_turn_by_the_base_of_their_kind_or_of_the_old_key() -> None:
    """None of their own where no layer has a window."""
    windows = window(settings(), [1])
    new = {"rope_parameters": {"sliding_attention": {"rope_theta": 50.0}}, "old": 70.0}
    assert turned_apart(settings(**new), windows, "old") == windows | {"windowed_rotary_base": 50.0}
    assert turned_apart(settings(old=70), windows, "old") == windows | {"windowed_rotary_base": 70.0}
    assert turned_apart(settings(old=70), {}, "old") == {}
