"""Hooks of the user's are seen whenever they come and go."""

import torch
from torch import nn

from megallm.core_async.device.hooks import hooks_of


def look(module: nn.Module, *_passed: object) -> None:
    """Stands for a probe."""
    assert isinstance(module, nn.Linear)


def test_hooks_are_seen_while_they_are_there() -> None:
    """A probe is put on long after the engine was started, and taken off again."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    hooks = hooks_of(modules)
    assert not any(hooks)
    before = modules[0].register_forward_pre_hook(look)
    after = modules[1].register_forward_hook(look)
    assert sum(map(len, hooks)) == 2
    modules[1](modules[0](torch.zeros(1, 2)))
    before.remove()
    after.remove()
    assert not any(hooks)
