"""One expert's tensors out of all experts'; that gpt-oss comes out right is in test_hf_families.py."""

import torch

from megallm.models.checkpoint import TensorSpec
from megallm.models.hf_joint_experts import JointPlace, joint_place

MLP = "model.layers.1.mlp"


def place(name: str, *shape: int) -> tuple[JointPlace, tuple[int, ...]]:
    """Gives where a tensor of four experts lies, and in what shape."""
    found = joint_place(TensorSpec(f"{MLP}.{name}", shape), 4)
    assert found is not None
    return found


def test_gate_and_up_projection_take_turns_in_one_tensor() -> None:
    """Inputs are its rows; ours has outputs as rows."""
    gate, shape = place("experts.2.gate_proj.weight", 3, 5)
    up, _ = place("experts.2.up_proj.weight", 3, 5)
    assert (gate.stored, shape) == (f"{MLP}.experts.gate_up_proj", (4, 5, 6))
    assert (gate.rows, up.rows) == (range(2, 3), range(2, 3))
    stored = torch.arange(4.0 * 5 * 6).view(shape)[2:3]
    assert gate.cut(stored).equal(stored[0, :, 0::2].T)
    assert up.cut(stored).equal(stored[0, :, 1::2].T)
    assert up.cut(stored, rows=range(1, 3)).equal(stored[0, :, 3::2].T)
    assert gate.cut(stored, columns=range(4)).equal(stored[0, :4, 0::2].T)
    assert gate.cut(stored).is_contiguous()


def test_the_other_projection_and_biases_lie_in_tensors_of_their_own() -> None:
    """A bias has no inputs to be transposed with."""
    down, shape = place("experts.0.down_proj.weight", 5, 3)
    assert (down.stored, shape) == (f"{MLP}.experts.down_proj", (4, 3, 5))
    bias, shape = place("experts.3.up_proj.bias", 3)
    assert (bias.stored, shape) == (f"{MLP}.experts.gate_up_proj_bias", (4, 6))
    assert bias.cut(torch.arange(6.0)[None]).tolist() == [1.0, 3.0, 5.0]


def test_what_is_no_expert_s_lies_where_it_would_anyway() -> None:
    """The router's weight, beside the experts."""
    assert joint_place(TensorSpec(f"{MLP}.gate.weight", (4, 5)), 4) is None
