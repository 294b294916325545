"""Sequence parallelism, which a step does without: every tensor-parallel rank has all of its tokens.

megatron splits the tokens between the layers to save training's activations. A step keeps none, a sum over
the ranks moves as many bytes as the scatter and the gather that it replaces, and any number of tokens will
do. Reads and sets modules' attributes; imports no megatron.
"""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SWITCHES = ("sequence_parallel", "reduce_scatter_embeddings")
"""Of linear layers, megatron's and Transformer Engine's, and of the embedding."""


class SequenceParallel:
    """What of a model splits tokens. Its modules change; the config, which others may share, is copied."""

    def __init__(self, model: nn.Module) -> None:
        modules = [vars(module) for module in model.modules()]
        self._switches = [(own, name) for own in modules for name in _SWITCHES if own.get(name) is True]
        self._with_config = [own for own in modules if _is_set(own.get("config"))]

    @contextmanager
    def off(self) -> Generator[None]:
        """Keeps tokens together inside the block; a trainer's pass after it splits them as before."""
        before = [(own, name, True) for own, name in self._switches]
        before += [(own, "config", own["config"]) for own in self._with_config]
        copies: dict[int, Any] = {}  # Any: megatron's configs are untyped
        for own in self._with_config:
            config = own["config"]
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].sequence_parallel = False
            own["config"] = copies[id(config)]
        for own, name in self._switches:
            own[name] = False
        try:
            yield
        finally:
            for own, name, value in before:
                own[name] = value


def _is_set(config: object) -> bool:
    return bool(getattr(config, "sequence_parallel", False))
