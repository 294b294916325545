"""Weights laid out by columns: the same parameter to everybody, before, during and after."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megallm.core_async.device.cpu_linear import make_fast, restore


def test_a_product_is_the_same_in_the_fast_layout() -> None:
    """The layout is an affair of memory alone."""
    weight = nn.Parameter(torch.randn(24, 40))
    x = torch.randn(5, 40)
    expected = functional.linear(x, weight)
    assert make_fast(weight)
    assert weight.shape == (24, 40)
    assert weight.stride() == (1, 24)
    torch.testing.assert_close(functional.linear(x, weight), expected, rtol=0, atol=1e-5)


def test_an_update_made_meanwhile_survives_restoring() -> None:
    """A trainer steps the same parameter between two rollouts, in place."""
    weight = nn.Parameter(torch.randn(6, 8))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = weight.detach().clone()
    # the engine binds in inference mode; memory made there could never be written to by a trainer
    with torch.inference_mode():
        make_fast(weight)
    functional.linear(torch.ones(1, 8), weight).sum().backward()
    optimizer.step()
    restore(weight)
    assert weight.is_contiguous()
    torch.testing.assert_close(weight.detach(), before - 1.0)


@pytest.mark.parametrize(
    "values",
    [torch.randn(4), torch.randn(1, 8), torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 4).t()],
    ids=["vector", "one row", "bfloat16", "already by columns"],
)
def test_what_gains_nothing_is_left_alone(values: torch.Tensor) -> None:
    """Only float32 matrices by rows are faster the other way, and nothing else is touched."""
    weight = nn.Parameter(values)
    address, strides = weight.data_ptr(), weight.stride()
    assert not make_fast(weight)
    assert (weight.data_ptr(), weight.stride()) == (address, strides)
