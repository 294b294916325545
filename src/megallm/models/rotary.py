"""Rotary frequencies, plain or scaled for longer texts.

Sources: Su et al., "RoFormer" (2021), 3.2; Chen et al., "Extending Context Window ... via Position
Interpolation" (2023), for "linear"; Grattafiori et al., "The Llama 3 Herd of Models" (2024), and the
released configuration, for "llama3"; Peng et al., "YaRN" (2023), 3.2 to 3.4, and appendix B.2 for
"dynamic"; Ding et al., "LongRoPE" (2024), for "factors". Knows no model.
"""

import math

import torch
from torch import Tensor

from megallm.models.checkpoint import Hyperparameters, RopeScaling


def inverse_frequencies(size: Hyperparameters, num_positions: int = 0) -> Tensor:
    """Gives the angle a position turns each pair by, `[rotary_dim / 2]`, float32 on the CPU.

    `num_positions` is the length of the longest text, where the frequencies go by it.
    """
    dim = size.turned_dim
    plain = _plain(size.rotary_base, dim)
    scaling = size.rope_scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "factors":
            is_long = scaling.long_divisors and num_positions > scaling.original_positions
            divisors = scaling.long_divisors if is_long else scaling.divisors
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case "dynamic":
            excess = max(num_positions / scaling.original_positions, 1.0) - 1.0
            growth = (1.0 + scaling.factor * excess) ** (dim / (dim - 2))
            return _plain(size.rotary_base * growth, dim)
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, dim, size.rotary_base)


def _plain(base: float, dim: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretches long waves by the factor, leaves short ones, and blends those between."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * (1 - share) + plain * share


def _yarn(plain: Tensor, scaling: RopeScaling, dim: int, base: float) -> Tensor:
    """Blends stretched and plain frequencies, dimension by dimension, over a ramp."""

    def dimension_of(rotations: float) -> float:
        positions = scaling.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(positions) / (2 * math.log(base))

    first, last = dimension_of(scaling.fast_rotations), dimension_of(scaling.slow_rotations)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # a ramp of no width is a step
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)
