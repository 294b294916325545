"""Sequence parallelism is off during a step and as it was after it; over ranks: tests/ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megallm.core_async.device.sequence_parallel import SequenceParallel


class Part(nn.Module):
    """A module with what megatron's have."""

    def __init__(self, config: object, **switches: bool) -> None:
        super().__init__()
        self.config = config
        vars(self).update(switches)


def model_of(config: object) -> Any:  # Any: its parts are found by name
    """Gives a model of three parts that share a config."""
    model: Any = Part(config)  # Any: the same
    model.embedding = Part(config, reduce_scatter_embeddings=True)
    model.column = Part(config, sequence_parallel=True)
    model.expert = Part(config, sequence_parallel=False)
    return model


def seen_of(model: Any) -> list[bool]:  # Any: the same
    """Gives the switches of the model, in order."""
    configs = [module.config.sequence_parallel for module in model.modules()]
    return [*configs, model.embedding.reduce_scatter_embeddings, model.column.sequence_parallel]


def test_every_switch_is_off_inside_and_back_after() -> None:
    """Also when the step fails; and a copy of the config is what changes: another model may share it."""
    config = SimpleNamespace(sequence_parallel=True, hidden_size=3)
    model = model_of(config)
    before = [dict(vars(module)) for module in model.modules()]
    tokens = SequenceParallel(model)

    def step() -> None:
        with tokens.off():
            assert seen_of(model) == [False] * 6
            assert config.sequence_parallel, "others' too"
            assert model.column.config is model.embedding.config
            assert model.config.hidden_size == 3
            raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            step()
        assert [vars(module) for module in model.modules()] == before
        assert model.column.config is config
        assert not model.expert.sequence_parallel


def test_a_model_without_it_is_left_alone() -> None:
    """A step then costs nothing more."""
    config = SimpleNamespace(sequence_parallel=False)
    model = model_of(config)
    del vars(model.embedding)["reduce_scatter_embeddings"], vars(model.column)["sequence_parallel"]
    with SequenceParallel(model).off():
        assert model.config is config
