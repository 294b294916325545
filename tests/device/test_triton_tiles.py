"""Tiled products, in Triton's interpreter: in float16, since its products in bfloat16 are wrong."""

import pytest
import torch

from megallm.core_async.device.tile_choice import Tiles
from megallm.core_async.device.triton_tiles import can_tile, tiled_product

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning",
    "ignore:overflow encountered in:RuntimeWarning",
)


def tiles(*, parts: int = 1, max_programs: int | None = None, group: int = 8) -> Tiles:
    """Gives small ones."""
    return Tiles(
        rows=32,
        outputs=16,
        depth=16,
        num_warps=4,
        num_stages=1,
        parts=parts,
        max_programs=max_programs,
        group=group,
    )


@pytest.mark.parametrize("num_rows", [1, 32, 70])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("max_programs", [None, 3])
def test_product_is_right_for_sizes_that_no_tile_divides(
    num_rows: int, parts: int, max_programs: int | None
) -> None:
    """Rows, outputs and inputs past the end add nothing, and a part may have no inputs at all."""
    rows, weight = torch.randn(num_rows, 40).half(), torch.randn(72, 40).half()
    product = tiled_product(rows, weight, tiles(parts=parts, max_programs=max_programs))
    total = product if parts == 1 else product.sum(0)
    assert product.dtype is (torch.float16 if parts == 1 else torch.float32)
    torch.testing.assert_close(total.float(), rows.float() @ weight.float().T, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("max_programs", [None, 2])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_gate_is_silu_of_the_first_half(max_programs: int | None, group: int) -> None:
    """A tile of outputs may end within the first half, and reads the second half from its own start."""
    rows, weight = torch.randn(70, 64).half() / 8, torch.randn(2 * 40, 64).half()
    first, second = (rows.float() @ weight.float().T).chunk(2, dim=-1)
    gated = tiled_product(rows, weight, tiles(max_programs=max_programs, group=group), is_gated=True)
    assert gated.shape == (70, 40)
    torch.testing.assert_close(gated.float(), torch.nn.functional.silu(first) * second, rtol=4e-3, atol=4e-3)


def test_rows_may_lie_apart() -> None:
    """Sampled tokens' states are a part of all tokens'."""
    wide, weight = torch.randn(40, 96).half(), torch.randn(32, 64).half()
    rows = wide[:, 16:80]
    assert can_tile(rows, weight)
    torch.testing.assert_close(
        tiled_product(rows, weight, tiles()).float(), rows.float() @ weight.float().T, rtol=2e-3, atol=1e-2
    )


def test_only_what_the_copy_engine_can_bring_is_tiled() -> None:
    """It takes rows of 16 bits whose starts are multiples of 16 bytes."""
    rows, weight = torch.zeros(40, 64).half(), torch.zeros(32, 64).half()
    assert can_tile(rows, weight)
    assert not can_tile(rows.float(), weight.float())
    assert not can_tile(rows.bfloat16(), weight)
    assert not can_tile(torch.zeros(40, 65).half()[:, :64], weight)
    assert not can_tile(torch.zeros(40, 80).half()[:, 1:65], weight)
    assert not can_tile(rows.t().contiguous().t(), weight)
