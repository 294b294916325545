"""Who looks at what passes through the user's modules: their own hooks, of now and of later."""
# pyright: reportPrivateUsage=false
# (torch keeps the hooks of all modules nowhere else)

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules import module as of_all


def hooks_of(modules: Iterable[nn.Module]) -> list[Mapping[int, object]]:
    """Gives the forward hooks of modules and those of all modules, as torch keeps them.

    What is registered later is in them, too.
    """
    own = [vars(module)[kind] for module in modules for kind in ("_forward_hooks", "_forward_pre_hooks")]
    return [*own, of_all._global_forward_hooks, of_all._global_forward_pre_hooks]  # noqa: SLF001 - as above
