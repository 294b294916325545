"""Products in one order of summing, in Triton's interpreter; on a GPU that tilings change no bit."""

import pytest
import torch

from megallm.core_async.device.triton_invariant_linear import InvariantTiling, product, tiling_for

SMALL = [
    InvariantTiling(rows=16, outputs=32, depth=16, num_warps=4, num_stages=1, is_swapped=True),
    InvariantTiling(rows=16, outputs=16, depth=32, num_warps=4, num_stages=1),
]


@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize("count", [1, 40])
def test_product_is_right_for_sizes_that_no_tile_divides(tiling: InvariantTiling, count: int) -> None:
    """Rows, outputs and inputs past the end must add nothing, and every program has its own tile."""
    rows, weight = torch.randn(count, 72), torch.randn(100, 72)
    torch.testing.assert_close(product(rows, weight, tiling), rows @ weight.T, rtol=1e-4, atol=1e-4)


def test_rows_may_be_a_part_of_wider_ones() -> None:
    """A layer hands on slices of its products."""
    wide, weight = torch.randn(3, 64), torch.randn(16, 32)
    torch.testing.assert_close(product(wide[:, 32:], weight, SMALL[0]), wide[:, 32:] @ weight.T)


def test_more_rows_take_larger_tiles_as_long_as_programs_fill_the_card() -> None:
    """A tile that reads less is worth nothing on a card that is half empty."""
    assert [tiling_for(count, 4096).rows for count in (1, 16, 17, 64, 128, 256, 8192)] == [
        16, 16, 32, 32, 64, 128, 256,
    ]  # fmt: skip
    assert tiling_for(1, 128_256).outputs == 128


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "depth"), [(1024, 2048), (4096, 4096), (6144, 1024), (1000, 576)])
def test_every_number_of_rows_gives_the_same_bits(outputs: int, depth: int) -> None:
    """Each size takes a tiling of its own, and all must sum in one order."""
    torch.manual_seed(0)
    rows = torch.randn(700, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, depth, device="cuda", dtype=torch.bfloat16)
    expected = product(rows, weight)
    torch.testing.assert_close(expected, rows @ weight.T, rtol=0.02, atol=0.5)
    for count in (1, 2, 16, 17, 32, 33, 64, 65, 200, 256, 257, 600):
        assert product(rows[:count], weight).equal(expected[:count]), tiling_for(count, outputs)
