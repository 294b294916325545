"""The layer's arithmetic on CUDA against torch's, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device import tile_choice
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.triton_ops import TritonOps

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_every_way_of_a_product_gives_what_torch_gives(num_rows: int) -> None:
    """One row, few rows and many take different kernels; a bias takes torch's."""
    ours, torchs = TritonOps(), TorchOps()
    rows, residual = torch.randn(num_rows, 64).half(), torch.randn(num_rows, 96).half()
    weight, norm, bias = torch.randn(96, 64).half(), torch.rand(96).half(), torch.randn(96).half()
    for some_bias in (None, bias):
        for got, expected in (
            (ours.linear(rows, weight, some_bias), torchs.linear(rows, weight, some_bias)),
            (ours.gated_linear(rows, weight, some_bias), torchs.gated_linear(rows, weight, some_bias)),
            (
                ours.add_linear(residual, rows, weight, some_bias),
                torchs.add_linear(residual, rows, weight, some_bias),
            ),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=6e-2)
        sums, normed = ours.add_linear_norm(residual, rows, weight, some_bias, norm, 1e-5)
        expected_sums, expected_normed = torchs.add_linear_norm(residual, rows, weight, some_bias, norm, 1e-5)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-2, atol=6e-2)
        torch.testing.assert_close(normed, expected_normed, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.rms_norm(residual, norm, 1e-5), torchs.rms_norm(residual, norm, 1e-5))


def test_product_of_no_rows_is_empty() -> None:
    """A step that samples nothing has none for the output layer, whose tokens are many."""
    rows, weight = torch.empty(0, 1, 16).half(), torch.zeros(70_000, 16).half()
    assert TritonOps().linear(rows, weight, None).shape == (0, 1, 70_000)


@pytest.mark.parametrize("num_rows", [40, 70])
def test_products_that_are_tiled_give_what_torch_gives(num_rows: int) -> None:
    """From some rows on a product of enough inputs takes the tiled kernel, with its gate or in parts."""
    ours, torchs = TritonOps(), TorchOps()
    rows, residual = torch.randn(num_rows, 1024).half() / 16, torch.randn(num_rows, 96).half()
    weight, norm = torch.randn(96, 1024).half(), torch.rand(96).half()
    wide = torch.randn(4096, 1024).half()
    assert tile_choice.split(num_rows, 96, 1024) is not None
    assert tile_choice.gated(num_rows, 48, 1024) is not None
    assert tile_choice.whole(num_rows, 4096, 1024) is not None
    sums, normed = ours.add_linear_norm(residual, rows, weight, None, norm, 1e-5)
    expected_sums, expected_normed = torchs.add_linear_norm(residual, rows, weight, None, norm, 1e-5)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-2, atol=6e-2)
    torch.testing.assert_close(normed, expected_normed, rtol=1e-2, atol=1e-2)
    for got, expected in (
        (ours.gated_linear(rows, weight, None), torchs.gated_linear(rows, weight, None)),
        (ours.linear(rows, wide, None), torchs.linear(rows, wide, None)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=6e-2)


def test_residual_is_overwritten_only_where_it_may_be() -> None:
    """What a layer was given may be somebody's; what is summed within it is nobody's."""
    ours = TritonOps()
    rows, residual = torch.randn(300, 64).half(), torch.randn(300, 96).half()
    weight, norm = torch.randn(96, 64).half(), torch.rand(96).half()
    kept = residual.clone()
    sums, normed = ours.add_linear_norm(residual, rows, weight, None, norm, 1e-5)
    assert residual.equal(kept)
    again, normed_again = ours.add_linear_norm(residual, rows, weight, None, norm, 1e-5, may_overwrite=True)
    assert again.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(again, sums, rtol=1e-2, atol=6e-2)
    torch.testing.assert_close(normed_again, normed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("outputs", [100, 4004, 4006])
def test_outputs_whose_rows_the_copy_engine_can_not_store_are_computed(outputs: int) -> None:
    """A part of a layer over several ranks may have any number of outputs."""
    ours, torchs = TritonOps(), TorchOps()
    rows, weight = torch.randn(40, 512).half() / 16, torch.randn(outputs, 512).half()
    for got, expected in (
        (ours.linear(rows, weight, None), torchs.linear(rows, weight, None)),
        (ours.gated_linear(rows, weight, None), torchs.gated_linear(rows, weight, None)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=6e-2)
