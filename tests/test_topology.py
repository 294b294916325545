"""Which ranks run a model together, read from the groups that a config names."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron.core.inference.config import InferenceConfig
from torch import distributed, nn

from megallm.core_async.topology import topology_of

type Groups = dict[str, list[int]]


def model_of(num_experts: int | None = None) -> nn.Module:
    """Gives what is asked of a model."""
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(num_moe_experts=num_experts)  # type: ignore[assignment] - a model's
    return model


def seen(groups: Groups, *, rank: int = 0, model: object = None) -> tuple[Any, ...]:
    """Gives (the model's ranks, the replicas' ranks, whether it leads, whether experts are shared)."""

    def ranks_of(group: list[int]) -> list[int]:
        return group

    def place_of(group: list[int] | None = None) -> int:
        assert group is not None
        return group.index(rank)

    every = {"mp": [rank], "dp": [rank], "pp": [rank], "tp_ep": [rank], **groups}
    settings: Any = SimpleNamespace(pg_collection=SimpleNamespace(**every))
    with mock.patch.multiple(
        distributed,
        get_world_size=len,
        get_rank=place_of,
        get_process_group_ranks=ranks_of,
    ):
        topology = topology_of(model, settings)
    own, others = topology.ranks, topology.replicas
    return own and own.names, others and others.names, topology.leads, topology.shares_experts


def test_without_groups_there_is_one_rank() -> None:
    """torch.distributed need not be there at all."""
    topology = topology_of(nn.Linear(1, 1), InferenceConfig())
    assert (topology.ranks, topology.replicas, topology.stages) == (None, None, None)
    assert topology.leads
    assert not topology.shares_experts


@pytest.mark.parametrize("wrong", [None, [], "smollm2-135m"])
def test_what_is_no_model_has_its_ranks_too(wrong: object) -> None:
    """They have to hear of it."""
    assert seen({"mp": [0, 1]}, rank=1, model=wrong) == ((0, 1), None, False, False)


@pytest.mark.parametrize(
    ("groups", "rank", "expected"),
    [
        ({"mp": [0], "dp": [0]}, 0, (None, None, True, False)),
        ({"mp": [0, 1], "dp": [0]}, 1, ((0, 1), None, False, False)),
        ({"mp": [2, 3], "dp": [0, 2]}, 2, ((2, 3), (0, 2), True, False)),
        ({"mp": [0], "dp": [0, 1], "tp_ep": [0, 1]}, 0, (None, (0, 1), True, True)),
        ({"mp": [0, 1], "dp": [0], "tp_ep": [0, 1]}, 0, ((0, 1), None, True, False)),
    ],
)
def test_the_groups_say_who_leads_and_who_shares(
    groups: Groups, rank: int, expected: tuple[object, ...]
) -> None:
    """Experts within one replica's ranks are that replica's own affair."""
    assert seen(groups, rank=rank, model=model_of(8)) == expected


def test_a_model_without_experts_shares_none() -> None:
    """Megatron's groups are there all the same."""
    assert seen({"mp": [0], "dp": [0, 1], "tp_ep": [0, 1]}, model=model_of()) == (None, (0, 1), True, False)
