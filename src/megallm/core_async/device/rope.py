"""Rotary positions, turned once a step: tables by position, gathered for the step's tokens.

Knows angles and how they turn a vector; knows no model. Source of the maths: Su et al., "RoFormer:
Enhanced Transformer with Rotary Position Embedding" (2021), section 3.2, in the two layouts that
checkpoints use: halves (the pair of dimension i is i + rotary_dim / 2) and interleaved (2i, 2i + 1).
"""

import torch
from msgspec import Struct
from torch import Tensor


class RopeTable(Struct, frozen=True, eq=False):
    """Cosines and sines of every position, `[max_positions, rotary_dim]` in the model's dtype."""

    cosines: Tensor
    sines: Tensor
    is_interleaved: bool


def table_of(angles: Tensor, *, factor: float, is_interleaved: bool, dtype: torch.dtype) -> RopeTable:
    """Makes the table from float32 `angles`, `[max_positions, rotary_dim]`, both of a pair given.

    `factor` multiplies cosines and sines: the attention factor of YaRN (Peng et al., 2023, 3.4).
    """
    return RopeTable(
        cosines=(angles.cos() * factor).to(dtype),
        sines=(angles.sin() * factor).to(dtype),
        is_interleaved=is_interleaved,
    )


def rotated(vectors: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
    """Turns `[tokens, heads, head_dim]` by each token's angles, `[tokens, rotary_dim]`.

    The first rotary_dim dimensions turn, the rest pass. Gives a new tensor.
    """
    rotary_dim = cosines.shape[-1]
    turning = vectors[..., :rotary_dim]
    turned = (
        turning * cosines[:, None] + _quarter_turned(turning, is_interleaved=is_interleaved) * sines[:, None]
    )
    if rotary_dim == vectors.shape[-1]:
        return turned
    return torch.cat((turned, vectors[..., rotary_dim:]), dim=-1)


def _quarter_turned(vectors: Tensor, *, is_interleaved: bool) -> Tensor:
    """Gives each pair (a, b) as (-b, a)."""
    if is_interleaved:
        return torch.stack((-vectors[..., 1::2], vectors[..., ::2]), dim=-1).flatten(-2)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
