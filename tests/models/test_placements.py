"""Where tensors go; that whole models come out right is in test_hf_families.py."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from megallm.core_async.errors import ModelFileError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Experts, Hyperparameters, tensor_specs
from megallm.models.placements import LayerNames, fill, placements
from tests.models.tiny_gguf import TINY

ALL = msgspec.structs.replace(
    TINY, is_tied=False, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_qk_norm=True
)
MIXED = msgspec.structs.replace(
    TINY, experts=Experts(num_experts=3, num_chosen=2, ffn_size=8, is_renormalised=True, dense_layers=(1,))
)


class Counted:
    """A checkpoint whose tensors count up from zero."""

    path = Path("counted")

    def __init__(self, size: Hyperparameters) -> None:
        self.hyperparameters = size
        self.shapes = {spec.name: spec.shape for spec in tensor_specs(size)}

    def read(self, name: str) -> torch.Tensor:
        """Gives a tensor."""
        shape = self.shapes[name]
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

    def tokenizer(self) -> ModelTokenizer:
        """Is not asked for."""
        raise AssertionError("a layout needs no tokenizer")


@pytest.mark.parametrize("size", [TINY, ALL, MIXED], ids=["plain", "everything", "experts"])
def test_every_tensor_goes_to_one_place(size: Hyperparameters) -> None:
    """A tensor that is never read is a model with a part missing."""
    placed = list(placements(size, LayerNames()))
    names = [name for placement in placed for name in placement.tensors]
    assert sorted(names) == sorted(spec.name for spec in tensor_specs(size))
    assert len({placement.parameter for placement in placed}) == len(placed)


def test_rows_are_laid_out_by_kv_head() -> None:
    """Queries 0 and 1, key 0, value 0, queries 2 and 3, key 1, value 1: heads of 16 rows."""
    checkpoint = Counted(TINY)
    parameters = {
        placement.parameter: nn.Parameter(torch.zeros(shape_of(placement.tensors, checkpoint)))
        for placement in placements(TINY, LayerNames())
    }
    fill(iter(parameters.items()), checkpoint, LayerNames())
    joint = parameters["decoder.layers.0.self_attention.linear_qkv.weight"].data[:, 0] / TINY.hidden_size
    starts = joint[::16].tolist()
    assert starts == [0, 16, 0, 0, 32, 48, 16, 16]


def shape_of(names: tuple[str, ...], checkpoint: Counted) -> tuple[int, ...]:
    """Gives the shape of tensors one below the other."""
    shapes = [checkpoint.shapes[name] for name in names]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def test_a_tensor_that_does_not_fit_is_refused_with_both_shapes() -> None:
    """The readers check before; this is what a mistake in one would come to."""
    checkpoint = Counted(TINY)
    checkpoint.shapes["model.embed_tokens.weight"] = (3, 64)
    embedding = nn.Parameter(torch.zeros(TINY.vocab_size, TINY.hidden_size))
    with pytest.raises(ModelFileError, match=r"word_embeddings\.weight takes \(272, 64\) .* \(3, 64\)"):
        fill(iter([("embedding.word_embeddings.weight", embedding)]), checkpoint, LayerNames())
