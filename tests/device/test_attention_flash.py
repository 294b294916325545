"""What the flash backend refuses; that it attends by definition is tested with the packages' stand-ins."""

import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_flash import FlashAttention
from tests.device.test_flash_libraries import LIBRARIES

SHAPE = LayerShape(4, 2, 64, 64, 1.0)


def test_models_in_float32_are_refused() -> None:
    """The packages have kernels for 16 bits alone."""
    for dtype in (torch.bfloat16, torch.float16):
        assert FlashAttention(LIBRARIES[0], 16, dtype).refusal(SHAPE) is None
    assert "float32, flash-attn in 16 bits" in str(
        FlashAttention(LIBRARIES[0], 16, torch.float32).refusal(SHAPE)
    )


def test_block_size_is_the_librarys_to_judge() -> None:
    """Version 2 alone minds it."""
    assert FlashAttention(LIBRARIES[2], 256, torch.bfloat16).refusal(SHAPE) is None
    assert "256" in str(FlashAttention(LIBRARIES[2], 16, torch.bfloat16).refusal(SHAPE))
