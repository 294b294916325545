"""Rotary frequencies, by hand; that each kind equals transformers is in test_hf_families.py."""

import msgspec
import torch

from megallm.models.checkpoint import RopeScaling
from megallm.models.rotary import inverse_frequencies
from tests.models.tiny_gguf import TINY


def scaled(scaling: RopeScaling | None) -> torch.Tensor:
    """Gives the frequencies of heads of four turning dimensions, base 100."""
    return inverse_frequencies(
        msgspec.structs.replace(TINY, rotary_dim=4, rotary_base=100.0, rope_scaling=scaling)
    )


def test_plain_frequencies_fall_from_one_by_the_base() -> None:
    """The first pair turns by one radian a token, the last hardly at all."""
    torch.testing.assert_close(scaled(None), torch.tensor([1.0, 0.1]))


def test_linear_scaling_divides_all_alike_and_divisors_each_its_own() -> None:
    """The two simplest kinds."""
    torch.testing.assert_close(scaled(RopeScaling(kind="linear", factor=4.0)), torch.tensor([0.25, 0.025]))
    divisors = RopeScaling(kind="factors", divisors=(1.0, 5.0))
    torch.testing.assert_close(scaled(divisors), torch.tensor([1.0, 0.02]))


def test_llama_3_leaves_short_waves_and_stretches_long_ones() -> None:
    """Nearby words keep their places, far ones come nearer."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_positions=60)
    torch.testing.assert_close(scaled(scaling), torch.tensor([1.0, 0.1 / 8]))


def test_yarn_s_ramp_goes_from_plain_to_stretched() -> None:
    """The ramp's ends are whole dimensions unless the config says otherwise."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_positions=64, fast_rotations=32, slow_rotations=1)
    torch.testing.assert_close(
        scaled(scaling), torch.tensor([1.0, 0.1 * (1 / 4 / 3 + 2 / 3)]), atol=0.03, rtol=0
    )
