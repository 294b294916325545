"""Rotary frequencies, by hand; that each kind equals transformers is in test_hf_families.py."""

import msgspec
import torch

from megallm.models.checkpoint import RopeScaling
from megallm.models.rotary import inverse_frequencies
from tests.models.tiny_gguf import TINY


def scaled(scaling: RopeScaling | None, num_positions: int = 0) -> torch.Tensor:
    """Gives the frequencies of heads of four turning dimensions, base 100."""
    size = msgspec.structs.replace(TINY, rotary_dim=4, rotary_base=100.0, rope_scaling=scaling)
    return inverse_frequencies(size, num_positions)


def test_plain_frequencies_fall_from_one_by_the_base() -> None:
    """The first pair turns by one radian a token, the last hardly at all."""
    torch.testing.assert_close(scaled(None), torch.tensor([1.0, 0.1]))


def test_linear_scaling_divides_all_alike_and_divisors_each_its_own() -> None:
    """The two simplest kinds."""
    torch.testing.assert_close(scaled(RopeScaling(kind="linear", factor=4.0)), torch.tensor([0.25, 0.025]))
    divisors = RopeScaling(kind="factors", divisors=(1.0, 5.0))
    torch.testing.assert_close(scaled(divisors), torch.tensor([1.0, 0.02]))


def test_divisors_of_long_texts_stand_in_for_the_others_past_the_original_length() -> None:
    """A text of the original length is still a short one."""
    divisors = RopeScaling(
        kind="factors", divisors=(1.0, 5.0), long_divisors=(2.0, 10.0), original_positions=64
    )
    torch.testing.assert_close(scaled(divisors, 64), torch.tensor([1.0, 0.02]))
    torch.testing.assert_close(scaled(divisors, 65), torch.tensor([0.5, 0.01]))


def test_a_dynamic_base_grows_with_the_text_past_the_original_length() -> None:
    """The last pair of a text four times as long turns once in as many tokens as the base's growth says."""
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_positions=64)
    torch.testing.assert_close(scaled(scaling, 64), torch.tensor([1.0, 0.1]))
    grown = 100.0 * 7.0**2  # the text's factor by two less one, to the power of 4 / (4 - 2)
    torch.testing.assert_close(scaled(scaling, 256), torch.tensor([1.0, grown**-0.5]))
    assert scaling.goes_by_length


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
