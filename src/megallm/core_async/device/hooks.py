"""Who looks at what passes through the user's modules: their own hooks, of now and of later."""

from collections.abc import Iterable, Mapping

from torch import nn


def hooks_of(modules: Iterable[nn.Module]) -> list[Mapping[int, object]]:
    """Gives the forward hooks of modules as these keep them: what is registered later is in them, too."""
    return [vars(module)[kind] for module in modules for kind in ("_forward_hooks", "_forward_pre_hooks")]
