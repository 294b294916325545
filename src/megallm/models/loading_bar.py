"""The bar of a model that is being loaded: parameters filled, of all, on stderr. Knows tqdm alone."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


class _Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs alone
    """tqdm without its monitor thread."""

    monitor_interval = 0


@contextmanager
def loading_bar(num_parameters: int, *, is_shown: bool | None) -> Generator[Callable[[int], None]]:
    """Gives what to call with each number of parameters that were filled.

    `is_shown`: None is on a terminal alone. The bar goes when the block ends.
    """
    shown = sys.stderr.isatty() if is_shown is None else is_shown
    bar = _Bar(
        total=num_parameters,
        desc="loading",
        unit=" parameters",
        unit_scale=True,
        dynamic_ncols=True,
        file=sys.stderr,
        leave=False,
        disable=not shown,
    )
    try:

        def advance(num_filled: int) -> None:
            bar.update(num_filled)

        yield advance
    finally:
        bar.close()
