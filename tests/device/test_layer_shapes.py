"""Layers in the engine's terms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.layer_shapes import (
    self_attention_shape,
    sinks_of,
    weights_of_layer,
    window_of,
)
from megallm.core_async.errors import UnsupportedModelError
from tests.device.conftest import built


def test_scale_is_the_configs_where_it_has_one() -> None:
    """Some models scale scores by something else than the root of the head's size."""
    model = built("grouped heads")
    attention = model.decoder.layers[0].self_attention
    shape = self_attention_shape(model.config, attention, window=None, has_rope=True)
    assert shape == LayerShape(4, 2, 16, 16, 0.25, uses_rope=True)
    changed = SimpleNamespace(**{**vars(model.config), "softmax_scale": 0.125})
    assert self_attention_shape(changed, attention, window=3, has_rope=False).scale == 0.125


def test_a_layer_with_a_rotary_module_of_its_own_arrives_turned() -> None:
    """The backend knows the model's table alone, and would turn a second time by it."""
    model = built("two rotary tables")
    turned_here = [
        self_attention_shape(model.config, layer.self_attention, window=None, has_rope=True).uses_rope
        for layer in model.decoder.layers
    ]
    assert turned_here == [True, False, True]


def test_layer_scaling_of_scores_cancels_out() -> None:
    """apply_query_key_layer_scaling divides by the layer's number, then multiplies by it in the softmax."""
    model = built("scaled scores")
    attention = model.decoder.layers[2].self_attention
    assert attention.core_attention.softmax_scale == pytest.approx(0.25 / 3)
    assert self_attention_shape(model.config, attention, window=None, has_rope=True).scale == 0.25


@pytest.mark.parametrize(
    ("window_size", "expected"), [((5, 0), 5), ((0, 0), 0), ((7, -1), 7), ((-1, 0), None)]
)
def test_window_is_how_far_back_a_query_sees(window_size: tuple[int, int], expected: int | None) -> None:
    """Megatron's -1 is no bound."""
    assert window_of(SimpleNamespace(window_size=window_size), "layer") == expected


def test_window_that_reaches_ahead_is_refused_by_the_layers_name() -> None:
    """A causal cache has no later tokens to show."""
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.4 attends 3 tokens ahead"):
        window_of(SimpleNamespace(window_size=(5, 3)), "decoder.layers.4")


def test_sinks_are_the_models_own_parameter_or_zero() -> None:
    """A copy would miss a trainer's update."""
    learned = built("learned sinks").decoder.layers[0].self_attention
    shape = LayerShape(4, 2, 16, 16, 0.25, has_sinks=True)
    assert sinks_of(learned, shape) is learned.core_attention.softmax_offset
    zero = sinks_of(built("grouped heads").decoder.layers[0].self_attention, shape)
    assert zero is not None
    assert zero.equal(torch.zeros(4))
    assert sinks_of(learned, LayerShape(4, 2, 16, 16, 0.25)) is None


def test_softcap_is_the_configs_where_it_has_one() -> None:
    """megatron-core has no such field; the bridge's Gemma 2 does, and 0 is none."""
    model = built("grouped heads")
    attention = model.decoder.layers[0].self_attention
    for bound, expected in ((50.0, 50.0), (None, None), (0.0, None)):
        changed = SimpleNamespace(**vars(model.config), attn_logit_softcapping=bound)
        assert self_attention_shape(changed, attention, window=None, has_rope=False).softcap == expected


def test_weights_of_a_layer_are_those_of_its_matrices_on_average() -> None:
    """Vectors cost a token next to nothing; a stage of a pipeline may have no layers."""
    model = built("query and key norms, biases")
    # queries and two groups' keys and values; the projection; gate and up; down
    assert weights_of_layer(model.decoder.layers) == 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert weights_of_layer([nn.Linear(4, 6), nn.Linear(4, 2)]) == 16
    assert weights_of_layer([]) == 0
