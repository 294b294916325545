"""Forwards that stand in for megatron's, against megatron's own."""

import torch
from torch.nn import functional

from megallm.core_async.device.forwards import plain_linear, router_gate
from tests.device.conftest import built
from tests.device.models import cpu_is_current


def test_plain_linear_gives_megatrons_product_and_bias() -> None:
    """Column layers hand the bias on or add it, row layers likewise; the caller must not notice."""
    model = built("query and key norms, biases")
    layer = model.decoder.layers[0]
    hidden = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0))
    wide = torch.randn(5, 1, 128, generator=torch.Generator().manual_seed(1))
    for linear, given in (
        (layer.self_attention.linear_qkv, hidden),
        (layer.mlp.linear_fc1, hidden),
        (layer.mlp.linear_fc2, wide),
    ):
        product, bias = plain_linear(linear, functional.linear)(given)
        with cpu_is_current():
            expected, expected_bias = type(linear).forward(linear, given)
        torch.testing.assert_close(product, expected)
        assert bias is expected_bias


def test_plain_linear_takes_the_weight_it_is_given() -> None:
    """A tied output layer has none of its own."""
    model = built("tied, interleaved rotary")
    weight = model.embedding.word_embeddings.weight
    hidden = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0))
    product, bias = plain_linear(model.output_layer, functional.linear)(
        hidden, weight=weight, runtime_gather_output=True
    )
    torch.testing.assert_close(product, hidden @ weight.t())
    assert bias is None


def test_router_gate_gives_megatrons_scores_in_the_routers_dtype() -> None:
    """Experts are chosen by them: one wrong score is another expert."""
    router = built("mixture of experts").decoder.layers[0].mlp.router
    hidden = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0))
    with cpu_is_current():
        expected = type(router).gating(router, hidden)
    torch.testing.assert_close(router_gate(router)(hidden), expected)
    kept = router.config.moe_router_dtype
    router.config.moe_router_dtype = "fp64"
    try:
        assert router_gate(router)(hidden).dtype == torch.float64
    finally:
        router.config.moe_router_dtype = kept


def test_router_gate_scores_no_tokens() -> None:
    """Megatron's own can't, and a replica without requests has none for the experts it shares."""
    router = built("mixture of experts").decoder.layers[0].mlp.router
    assert router_gate(router)(torch.empty(0, 1, 64)).shape == (0, 1, 4)
