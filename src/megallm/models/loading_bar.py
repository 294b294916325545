"""What a load shows on stderr: the step it is at, and a bar of parameters while weights are read.

One line, which goes when the load ends. Knows tqdm alone.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager

from tqdm import tqdm


class _Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs alone
    """tqdm without its monitor thread."""

    monitor_interval = 0


class LoadingBar:
    """The line of one load; where it is not shown, nothing happens."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar = _Bar(
            desc="loading",
            bar_format="{desc}",
            unit=" parameters",
            unit_scale=True,
            dynamic_ncols=True,
            file=sys.stderr,
            leave=False,
            disable=not is_shown,
        )

    def say(self, step: str) -> None:
        """Shows the step that begins, in place of what was there."""
        self._bar.bar_format = "{desc} ..."
        self._bar.set_description_str(step)

    def begin(self, num_parameters: int) -> None:
        """Shows a bar of so many parameters, none of them read."""
        self._bar.bar_format = None
        self._bar.set_description("reading weights", refresh=False)
        self._bar.reset(num_parameters)

    def advance(self, num_read: int) -> None:
        """Counts parameters that were read."""
        self._bar.update(num_read)

    def close(self) -> None:
        """Takes the line away; a second call does nothing."""
        self._bar.close()


@contextmanager
def loading_bar(*, is_shown: bool | None) -> Generator[LoadingBar]:
    """Gives the line of a load, until the block ends. `is_shown`: None is on a terminal alone."""
    bar = LoadingBar(is_shown=sys.stderr.isatty() if is_shown is None else is_shown)
    try:
        yield bar
    finally:
        bar.close()
