"""A layer's arithmetic without a row's neighbours in it, in Triton's interpreter."""

import pytest
import torch
from torch import nn

from megallm.core_async.device import invariant_ops
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.invariant_ops import InvariantOps

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_arithmetic_is_torchs() -> None:
    """Products with and without bias, of no row and of several dimensions, norms and gates."""
    ops, plain = InvariantOps(sizes=[]), TorchOps()
    rows, residual = torch.randn(5, 24), torch.randn(5, 32)
    weight, bias, scales = torch.randn(32, 24), torch.randn(32), torch.rand(32)
    for ours, theirs in (
        (ops.linear(rows, weight, bias), plain.linear(rows, weight, bias)),
        (ops.linear(rows[:, None], weight, None), plain.linear(rows[:, None], weight, None)),
        (ops.linear(rows[:0, None], weight, None), plain.linear(rows[:0, None], weight, None)),
        (ops.gated_linear(rows, weight, None), plain.gated_linear(rows, weight, None)),
        (ops.add_linear(residual, rows, weight, None), plain.add_linear(residual, rows, weight, None)),
        (ops.rms_norm(residual, scales, 1e-5), plain.rms_norm(residual, scales, 1e-5)),
        *zip(
            ops.add_linear_norm(residual, rows, weight, bias, scales, 1e-5),
            plain.add_linear_norm(residual, rows, weight, bias, scales, 1e-5),
            strict=True,
        ),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_many_rows_go_to_the_library_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slice a row falls into, the product is its own."""
    monkeypatch.setattr(invariant_ops, "SLICE", 4)
    ops = InvariantOps(sizes=[3, 4, 8])
    weight = nn.Parameter(torch.randn(16, 1).sign(), requires_grad=False)  # one input: nothing is summed
    assert ops.prepare(weight) is None
    assert list(vars(ops)["_equal"].values()) == [[8, 4, 3]]
    for count in (1, 3, 4, 7, 8, 13, 23):
        rows = torch.randn(count, 1)
        assert ops.linear(rows, weight, None).equal(rows @ weight.T)
