"""Rotary positions against the definition, a rotation of each pair in the plane."""

import math

import pytest
import torch

from megallm.core_async.device.rope import rotated, table_of


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_each_pair_turns_by_its_angle(is_interleaved: bool, rotary_dim: int) -> None:  # noqa: FBT001
    """Both layouts that checkpoints use, and heads of which a part turns."""
    half = rotary_dim // 2
    frequencies = 0.7 ** torch.arange(half)
    angles = torch.arange(5.0)[:, None] * frequencies
    both = angles.repeat_interleave(2, dim=-1) if is_interleaved else torch.cat((angles, angles), dim=-1)
    table = table_of(both, factor=1.5, is_interleaved=is_interleaved, dtype=torch.float32)
    vectors = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    turned = rotated(vectors, table.cosines, table.sines, is_interleaved=is_interleaved)
    assert turned[..., rotary_dim:].equal(vectors[..., rotary_dim:])
    for token in range(5):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + half)
            angle = float(angles[token, pair])
            a, b = vectors[token, :, first], vectors[token, :, second]
            expected = 1.5 * (a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[token, :, first], expected)
            torch.testing.assert_close(
                turned[token, :, second], 1.5 * (a * math.sin(angle) + b * math.cos(angle))
            )


def test_table_is_rounded_to_the_models_dtype() -> None:
    """Megatron rounds cosines before it multiplies, and equal logits need the same."""
    angles = torch.arange(6.0)[:, None] * torch.tensor([0.3, 0.3])
    table = table_of(angles, factor=1.0, is_interleaved=False, dtype=torch.bfloat16)
    assert table.cosines.equal(angles.cos().bfloat16())
    assert table.sines.dtype == torch.bfloat16
