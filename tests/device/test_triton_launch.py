"""When kernels are chained."""

import pytest
import torch

from megallm.core_async.device.triton_launch import alone, chained, starts_next_early

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_nothing_is_chained_without_a_gpu() -> None:
    """The interpreter knows no launch options, and older cards no such launch."""
    assert chained(torch.zeros(1, 3)) == {"CHAINED": False}


def test_kernel_alone_has_no_launch_that_is_early() -> None:
    """It would read what the kernel ahead still writes: `launch_pdl` must not be there at all."""
    assert alone() == {"CHAINED": 0}


@pytest.mark.parametrize(
    ("shape", "is_early"),
    [
        ((1, 14336), True),
        ((2, 3072), True),
        ((256, 8, 2, 128), True),
        ((256, 8, 4, 128), False),
        ((257, 1024), False),
        ((128, 4096), False),
    ],
)
def test_kernels_of_few_and_narrow_tokens_start_beside_each_other(
    shape: tuple[int, ...],
    is_early: bool,  # noqa: FBT001 - a case
) -> None:
    """Wider ones fill the card, and what waits beside them takes their room."""
    assert starts_next_early(torch.empty(shape)) == is_early
