"""When kernels are chained."""

import torch

from megallm.core_async.device.triton_launch import chained


def test_nothing_is_chained_without_a_gpu() -> None:
    """The interpreter knows no launch options, and older cards no such launch."""
    assert chained(torch.zeros(1, 3)) == {"CHAINED": False}
