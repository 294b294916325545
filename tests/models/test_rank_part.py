"""Which part of a model a rank holds, and which sizes it can be split by."""

import re

import msgspec
import pytest

from megallm.models.checkpoint import Experts
from megallm.models.rank_part import Place, RankPart, Sizes
from tests.models.tiny_gguf import TINY

MIXED = msgspec.structs.replace(
    TINY, experts=Experts(num_experts=6, num_chosen=2, ffn_size=10, is_renormalised=True)
)


def test_shares_lie_one_after_the_other() -> None:
    """Ranks gather what they computed in the order of their numbers."""
    assert [Place(rank, 3).share(12) for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    assert Place().share(12) is None


def test_a_stage_knows_its_layers_and_what_stands_at_its_ends() -> None:
    """Tokens come in at the first one, logits out of the last."""
    stages = [RankPart(pp=Place(rank, 3)) for rank in range(3)]
    assert [list(stage.layers(6)) for stage in stages] == [[0, 1], [2, 3], [4, 5]]
    assert [stage.has_embedding for stage in stages] == [True, False, False]
    assert [stage.has_output for stage in stages] == [False, False, True]
    whole = RankPart()
    assert list(whole.layers(2)) == [0, 1]
    assert whole.has_embedding
    assert whole.has_output


def test_a_vocabulary_that_does_not_divide_is_padded_as_megatron_does() -> None:
    """A multiple of 128 rows for each rank; one that divides stays as it is, as on one rank."""
    parts = [RankPart(tp=Place(rank, 3)) for rank in range(3)]
    assert [part.padded_vocab_size(49_152) for part in parts] == [49_152] * 3
    assert parts[0].padded_vocab_size(32_000) == 32_256 == 3 * 84 * 128
    assert [part.vocabulary(32_000) for part in parts] == [
        range(10_752),
        range(10_752, 21_504),
        range(21_504, 32_000),
    ]
    assert RankPart().vocabulary(32_000) is None


@pytest.mark.parametrize(
    ("tp", "ep", "etp"), [(4, 1, 4), (4, 2, 2), (2, 2, 1), (2, 4, 1), (1, 4, 1), (3, 2, 1)]
)
def test_experts_lie_over_the_ranks_of_tensor_parallelism_first(tp: int, ep: int, etp: int) -> None:
    """So that tp=2 and ep=2 need two processes: megatron's own default would split each expert, on four."""
    assert Sizes.asked(tp, 1, ep).etp == etp


def test_an_expert_with_biases_is_not_split() -> None:
    """Each rank would add them, and the sum would have them twice."""
    assert MIXED.experts is not None
    size = msgspec.structs.replace(MIXED, experts=msgspec.structs.replace(MIXED.experts, has_bias=True))
    Sizes.asked(2, 1, 2).check_model(size)
    with pytest.raises(ValueError, match="etp is 2 and does not divide the model's 1 bias of each expert"):
        Sizes.asked(2, 1, 1).check_model(size)


def test_a_norm_over_all_heads_is_not_split() -> None:
    """Each rank would norm its own heads alone, and nobody would notice."""
    size = msgspec.structs.replace(TINY, is_qk_norm_joint=True)
    with pytest.raises(
        ValueError, match="tp is 2 and does not divide the model's 1 norm over all heads; it can be 1"
    ):
        Sizes.asked(2, 1, 1).check_model(size)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"pp": 3}, "pp is 3 and does not divide the model's 2 layers; it can be 1, 2"),
        ({"tp": 3}, "tp is 3 and does not divide the model's 4 attention heads; it can be 1, 2"),
        ({"tp": 4}, "tp is 4 and does not divide the model's 2 KV groups; it can be 1, 2"),
        ({"ep": 4}, "ep is 4 and does not divide the model's 6 experts; it can be 1, 2, 3, 6"),
        (
            {"etp": 4},
            "etp is 4 and does not divide the model's 10 rows in each expert; it can be 1, 2, 5, 10",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(sizes: dict[str, int], said: str) -> None:
    """Megatron fails an assertion, somewhere in a layer."""
    with pytest.raises(ValueError, match=re.escape(said)):
        Sizes(**sizes).check_model(MIXED)


def test_rows_in_the_mlp_are_counted_where_there_is_one() -> None:
    """A mixture of experts names a size for an MLP that no layer of it has."""
    odd = msgspec.structs.replace(MIXED, ffn_size=97)
    Sizes(tp=2).check_model(odd)
    with pytest.raises(ValueError, match="tp is 2 and does not divide the model's 97 rows in the MLP"):
        Sizes(tp=2).check_model(msgspec.structs.replace(odd, experts=None))


def test_processes_that_are_too_few_or_left_over_are_refused_with_the_number_to_start() -> None:
    """Megatron's own message says what is not divisible, and nothing of torchrun."""
    Sizes(tp=2, pp=2).check_world(8)
    with pytest.raises(ValueError, match=r"^tp=2, pp=2 and ep=1 need a multiple of 4 .* are 6; .*-node 4,"):
        Sizes(tp=2, pp=2).check_world(6)
    with pytest.raises(
        ValueError, match=r"^tp=3, pp=1 and ep=2 need a multiple of 6 processes, and there are 3"
    ):
        Sizes.asked(3, 1, 2).check_world(3)


@pytest.mark.parametrize("name", ["tp", "pp", "ep"])
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    """Zero is what an option that was forgotten comes to."""
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 or more"):
        Sizes.asked(**{"tp": 1, "pp": 1, "ep": 1, name: 0})
