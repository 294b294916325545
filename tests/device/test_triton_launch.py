"""When kernels are chained."""

import pytest
import torch

from megallm.core_async.device.triton_launch import chained

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_nothing_is_chained_without_a_gpu() -> None:
    """The interpreter knows no launch options, and older cards no such launch."""
    assert chained(torch.zeros(1, 3)) == {"CHAINED": False}
