"""Products of few rows, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.triton_linear import Tiling, add_rms_norm_of_parts, few_rows

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize("parts", [1, 2])
def test_product_is_right_for_sizes_that_no_tile_divides(num_rows: int, parts: int) -> None:
    """Outputs and inputs past the end must add nothing."""
    rows, weight = torch.randn(num_rows, 72), torch.randn(40, 72)
    product = few_rows(rows, weight, Tiling(16, 16, parts, 4, 1))
    total = product if parts == 1 else product.sum(0)
    torch.testing.assert_close(total, rows @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_gate_is_silu_of_the_first_half(num_rows: int) -> None:
    """Both halves of the weight are read by one program."""
    rows, weight = torch.randn(num_rows, 32), torch.randn(48, 32)
    first, second = (rows @ weight.T).chunk(2, dim=-1)
    gated = few_rows(rows, weight, Tiling(16, 16, 1, 4, 1), is_gated=True)
    torch.testing.assert_close(gated, torch.nn.functional.silu(first) * second, rtol=1e-4, atol=1e-4)


def test_parts_residual_and_norm_are_one_sum() -> None:
    """The residual stays as it is."""
    parts, residual, weight = torch.randn(3, 5, 48), torch.randn(5, 48), torch.rand(48)
    total, normed = add_rms_norm_of_parts(parts, kept := residual.clone(), weight, 1e-5)
    assert kept.equal(residual)
    torch.testing.assert_close(total, parts.sum(0) + residual)
    torch.testing.assert_close(normed, torch.rms_norm(total, (48,), weight, 1e-5))
