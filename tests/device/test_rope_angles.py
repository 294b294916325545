"""Angles asked of megatron's rotary modules."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megallm.core_async.device.rope_angles import angles_of
from megallm.core_async.errors import UnsupportedModelError
from tests.device.conftest import built

CPU = torch.device("cpu")


def test_angles_are_the_modules_frequencies_times_the_position() -> None:
    """Both of a pair have the same angle, in float32."""
    rotary = built("grouped heads").rotary_pos_emb
    angles, factor = angles_of(rotary, 20, CPU)
    frequencies = 10_000 ** -(torch.arange(0, 16, 2) / 16)
    expected = torch.outer(torch.arange(20.0), torch.cat((frequencies, frequencies)))
    torch.testing.assert_close(angles[:, 0, 0], expected)
    assert factor is None


def test_stretched_positions_come_with_their_factor() -> None:
    """YaRN's vectors grow; megatron hands the factor on beside the angles."""
    _, factor = angles_of(built("yarn").rotary_pos_emb, 20, CPU)
    assert factor is not None
    assert factor > 1


def test_module_and_torch_are_left_as_they_were() -> None:
    """The module would move its frequencies, and the next caller ask for the device."""
    rotary, asked = built("grouped heads").rotary_pos_emb, torch.cuda.current_device
    before = {name: id(value) for name, value in vars(rotary).items()}
    angles_of(rotary, 20, CPU)
    assert {name: id(value) for name, value in vars(rotary).items()} == before
    assert torch.cuda.current_device is asked


def test_other_modules_are_refused_by_name() -> None:
    """Angles that depend on more than the position can't be one table."""
    with pytest.raises(UnsupportedModelError, match="the rotary module is a Linear"):
        angles_of(nn.Linear(2, 2), 20, CPU)


class TwoTables(RotaryEmbedding):
    """Answers with two tables, as the bridge's for Gemma 3 does."""

    def forward(self, max_seq_len: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride] - so does the bridge
        """Gives one for layers with a window, and one for the others."""
        return self.get_emb(max_seq_len), self.get_emb(max_seq_len)


def test_a_module_that_answers_otherwise_than_megatron_s_is_refused_by_name() -> None:
    """Its layers would take rows of one table for two tables, and go on."""
    with pytest.raises(UnsupportedModelError, match="the rotary module is a TwoTables"):
        angles_of(TwoTables(16, 1.0, use_cpu_initialization=True), 20, CPU)
