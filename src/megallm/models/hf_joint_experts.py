"""Experts of a Hugging Face folder that lie in one tensor, transposed, gate and up projection taking turns.

As gpt-oss has them. Knows our names of experts' tensors and the folder's; opens no file.
"""

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from megallm.models.checkpoint import TensorSpec

if TYPE_CHECKING:
    import torch

_JOINT: Final = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
"""Of each projection: the tensor it lies in, its first output there, and the step to the next one."""
_BETWEEN: Final = ".experts."


class JointPlace(Struct, frozen=True):
    """One expert's projection, or its bias, in the tensor of all experts."""

    stored: str
    expert: int
    first: int
    every: int

    @property
    def rows(self) -> range:
        """Gives the stored rows, all of one expert's, that have to be read."""
        return range(self.expert, self.expert + 1)

    def cut(
        self, values: "torch.Tensor", *, rows: range | None = None, columns: range | None = None
    ) -> "torch.Tensor":
        """Gives the projection, or a part of it, out of the expert's `values`, in memory of its own."""
        own = values[0][..., self.first :: self.every].t()
        own = own if rows is None else own[rows.start : rows.stop]
        return (own if columns is None else own[:, columns.start : columns.stop]).contiguous()


def joint_place(spec: TensorSpec, num_experts: int) -> tuple[JointPlace, tuple[int, ...]] | None:
    """Gives where an expert's tensor lies, and the shape of what it lies in; None of any other tensor."""
    layer, between, tail = spec.name.partition(_BETWEEN)
    if not between:
        return None
    expert, projection, kind = tail.split(".")
    whole, first, every = _JOINT[projection]
    stored = f"{layer}{_BETWEEN}{whole}" + ("_bias" if kind == "bias" else "")
    outputs, *inputs = spec.shape
    return JointPlace(stored, int(expert), first, every), (num_experts, *inputs, outputs * every)
