"""Which modules of a model the hook knows."""

from megallm.core_async.device.attention_sites import attention_sites, is_dense_layer, is_plain_linear
from tests.device.conftest import built


def test_sites_are_the_attention_layers_in_order() -> None:
    """Caches are given to layers by their place."""
    model = built("hybrid")
    sites = list(attention_sites(model))
    with_attention = [layer for layer in model.decoder.layers if hasattr(layer.self_attention, "linear_qkv")]
    assert [id(site.layer) for site in sites] == [id(layer) for layer in with_attention]


def test_experts_make_a_layer_more_than_dense() -> None:
    """A router asks the device for numbers in the middle of a step."""
    assert all(map(is_dense_layer, built("grouped heads").decoder.layers))
    assert not any(map(is_dense_layer, built("mixture of experts").decoder.layers))


def test_norms_are_no_linear_layers() -> None:
    """Their forward is not a product."""
    layer = built("grouped heads").decoder.layers[0]
    assert is_plain_linear(layer.mlp.linear_fc1)
    assert not is_plain_linear(layer.input_layernorm)
