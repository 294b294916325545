"""Where tensors go, whole and in parts; that whole models come out right is in test_hf_families.py."""

import itertools
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.errors import ModelFileError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Experts, Hyperparameters, tensor_specs
from megallm.models.placements import LayerNames, fill, placements
from megallm.models.rank_part import Place, RankPart
from tests.models.tiny_gguf import TINY

ALL = msgspec.structs.replace(
    TINY, is_tied=False, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_qk_norm=True
)
MIXED = msgspec.structs.replace(
    TINY, experts=Experts(num_experts=4, num_chosen=2, ffn_size=8, is_renormalised=True, dense_layers=(1,))
)
assert MIXED.experts is not None
SHARED = msgspec.structs.replace(
    MIXED,
    has_output_norms=True,
    experts=msgspec.structs.replace(
        MIXED.experts, shared_ffn_size=12, has_shared_gate=True, scoring="sigmoid"
    ),
)
BIASED = msgspec.structs.replace(
    MIXED, has_sinks=True, experts=msgspec.structs.replace(MIXED.experts, has_bias=True)
)
SIZES = {
    "plain": TINY,
    "everything": ALL,
    "experts": MIXED,
    "a shared expert, output norms": SHARED,
    "biased experts, sinks": BIASED,
}
UNGATED = msgspec.structs.replace(ALL, norm="layer", has_gate=False)
UNNORMED = msgspec.structs.replace(ALL, has_input_norms=False, has_output_norms=True)


class Counted:
    """A checkpoint whose numbers count up from zero, each tensor's from where the one before it ended."""

    path = Path("counted")

    def __init__(self, size: Hyperparameters) -> None:
        self.hyperparameters = size
        self.tensors: dict[str, Tensor] = {}
        first = 0
        for spec in tensor_specs(size):
            count = torch.Size(spec.shape).numel()
            self.tensors[spec.name] = torch.arange(first, first + count, dtype=torch.float64).view(spec.shape)
            first += count

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Gives a tensor, or a part."""
        values = self.tensors[name]
        values = values if rows is None else values[rows.start : rows.stop]
        return (values if columns is None else values[:, columns.start : columns.stop]).clone()

    def tokenizer(self) -> ModelTokenizer:
        """Is not asked for."""
        raise AssertionError("a layout needs no tokenizer")


@pytest.mark.parametrize(
    "size", [*SIZES.values(), UNGATED, UNNORMED], ids=[*SIZES, "layer norms, no gates", "no input norms"]
)
def test_every_tensor_goes_to_one_place(size: Hyperparameters) -> None:
    """A tensor that is never read is a model with a part missing."""
    placed = list(placements(size, LayerNames()))
    names = [source.name for placement in placed for source in placement.sources]
    assert sorted(names) == sorted(spec.name for spec in tensor_specs(size))
    assert len({placement.parameter for placement in placed}) == len(placed)


def filled(checkpoint: Counted, shapes: dict[str, torch.Size], part: RankPart) -> dict[str, Tensor]:
    """Gives parameters of these shapes, filled."""
    parameters = {
        name: nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float64))
        for name, shape in shapes.items()
    }
    fill(iter(parameters.items()), checkpoint, LayerNames(), part)
    return {name: parameter.data for name, parameter in parameters.items()}


def whole_of(checkpoint: Counted) -> dict[str, Tensor]:
    """Gives the parameters of the whole model."""
    shapes: dict[str, torch.Size] = {}
    for placement in placements(checkpoint.hyperparameters, LayerNames()):
        parts = [checkpoint.tensors[source.name].shape for source in placement.sources]
        shapes[placement.parameter] = torch.Size([sum(shape[0] for shape in parts), *parts[0][1:]])
    return filled(checkpoint, shapes, RankPart())


def test_what_is_added_to_the_residual_bears_its_factor() -> None:
    """Its biases, too; and it need not be multiplied at every step."""
    checkpoint = Counted(msgspec.structs.replace(ALL, residual_factor=0.25))
    whole = whole_of(checkpoint)
    for parameter, tensor, factor in (
        ("self_attention.linear_proj.bias", "self_attn.o_proj.bias", 0.25),
        ("mlp.linear_fc2.weight", "mlp.down_proj.weight", 0.25),
        ("mlp.linear_fc1.weight", "mlp.gate_proj.weight", 1.0),
    ):
        values = checkpoint.tensors[f"model.layers.1.{tensor}"] * factor
        assert torch.equal(whole[f"decoder.layers.1.{parameter}"][: len(values)], values)


def test_rows_are_laid_out_by_kv_head() -> None:
    """Queries 0 and 1, key 0, value 0, queries 2 and 3, key 1, value 1: heads of 16 rows."""
    checkpoint = Counted(TINY)
    joint = whole_of(checkpoint)["decoder.layers.0.self_attention.linear_qkv.weight"]
    query, key, value = (
        checkpoint.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].split(16) for name in "qkv"
    )
    assert torch.equal(
        joint, torch.cat([query[0], query[1], key[0], value[0], query[2], query[3], key[1], value[1]])
    )


def parts(tp: int, pp: int, ep: int, etp: int) -> list[RankPart]:
    """Gives every rank's part."""
    return [
        RankPart(*map(Place, ranks, (tp, pp, ep, etp)))
        for ranks in itertools.product(range(tp), range(pp), range(ep), range(etp))
    ]


def of_whole(whole: dict[str, Tensor], part: RankPart) -> dict[str, Tensor]:
    """Cuts a rank's part out of the whole model's parameters, by their names and megatron's rules."""
    names = {name: name_on_rank(name, part) for name in whole}
    cut = {kept: slice_of(name, whole[name], part) for name, kept in names.items() if kept is not None}
    if "output_layer.weight" not in whole and part.has_output and not part.has_embedding:
        embedding = "embedding.word_embeddings.weight"
        cut["output_layer.weight"] = slice_of(embedding, whole[embedding], part)
    return cut


def name_on_rank(name: str, part: RankPart) -> str | None:
    """Gives what a rank calls a parameter of the whole model; None where it has nothing of it."""
    if not name.startswith("decoder.layers."):
        return name if (part.has_embedding if name.startswith("embedding") else part.has_output) else None
    words = name.split(".")
    counts = [(2, TINY.num_layers, part.pp)]
    if "local_experts" in words:
        counts.append((6, 4, part.ep))
    for place, total, ranks in counts:
        each = total // ranks.size
        if int(words[place]) // each != ranks.rank:
            return None
        words[place] = str(int(words[place]) % each)
    return ".".join(words)


def slice_of(name: str, values: Tensor, part: RankPart) -> Tensor:
    """Gives the rows or columns of a parameter that tensor parallelism gives a rank."""
    place = part.etp if ".local_experts." in name else part.tp
    if "linear_fc1." in name:
        return torch.cat([half.chunk(place.size)[place.rank] for half in values.chunk(2)])
    if (
        "linear_qkv." in name
        or "softmax_offset" in name
        or "word_embeddings" in name
        or "output_layer" in name
    ):
        return values.chunk(place.size)[place.rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return values.chunk(place.size, dim=1)[place.rank]
    return values


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "ranks", [(2, 1, 1, 2), (1, 2, 1, 1), (2, 2, 2, 1), (1, 1, 4, 1), (2, 1, 2, 2)], ids=str
)
def test_the_parts_of_all_ranks_are_the_whole(
    size: Hyperparameters, ranks: tuple[int, int, int, int]
) -> None:
    """A slice a row off gives fluent nonsense; sizes are TP, PP, EP and the ranks of an expert."""
    checkpoint = Counted(size)
    whole = whole_of(checkpoint)
    for part in parts(*ranks):
        expected = of_whole(whole, part)
        found = filled(checkpoint, {name: values.shape for name, values in expected.items()}, part)
        for name, values in expected.items():
            assert torch.equal(found[name], values), (part, name)


def test_rows_beyond_the_vocabulary_are_zero() -> None:
    """Two ranks of 101 tokens have 128 rows each, as megatron pads them: the second one's are all padding."""
    checkpoint = Counted(msgspec.structs.replace(TINY, vocab_size=101))
    layers = whole_of(checkpoint)
    tokens = layers.pop("embedding.word_embeddings.weight")
    for rank, part in enumerate(parts(2, 1, 1, 2)[::2]):
        assert part.tp.rank == rank
        shapes = {name: values.shape for name, values in of_whole(layers, part).items()}
        shapes["embedding.word_embeddings.weight"] = torch.Size([128, TINY.hidden_size])
        rows = filled(checkpoint, shapes, part)["embedding.word_embeddings.weight"]
        own = tokens if rank == 0 else tokens[:0]
        assert torch.equal(rows[: len(own)], own)
        assert not rows[len(own) :].any()


def test_a_tensor_that_does_not_fit_is_refused_with_both_shapes() -> None:
    """The readers check before; this is what a mistake in one would come to."""
    checkpoint = Counted(TINY)
    checkpoint.tensors["model.embed_tokens.weight"] = torch.zeros(3, 64)
    embedding = nn.Parameter(torch.zeros(TINY.vocab_size, TINY.hidden_size))
    with pytest.raises(ModelFileError, match=r"word_embeddings\.weight takes \(272, 64\) .* \(3, 64\)"):
        fill(iter([("embedding.word_embeddings.weight", embedding)]), checkpoint, LayerNames())
