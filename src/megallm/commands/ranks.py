"""A command on several ranks: one leads and talks, the others take part, quietly, until it ends.

Launchers signal every rank alike. Knows signals and streams; knows no launcher and no engine.
"""

import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

_ENDING = (signal.SIGINT, signal.SIGTERM)


class Ending(Protocol):
    """The part of an engine that a rank waits for."""

    def wait_for_shutdown(self) -> None:
        """Blocks until it has stopped. Raises: what it failed of."""
        ...


@contextmanager
def leading[T](engine: AbstractContextManager[T]) -> Generator[T]:
    """Opens the leading rank's engine: while it runs, SIGTERM is as Ctrl-C.

    Killed, it would leave it to the others to find out.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with engine as opened:
            yield opened
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def taking_part[T: Ending](engine: AbstractContextManager[T]) -> Generator[T]:
    """Opens the engine of a rank that another leads, and waits at the end of the block until that ends.

    The leading rank has the same signals and says what they mean: a server first gives answers under way
    the time to finish. So the first of each does nothing here, and a second one kills.

    Raises: what the engine failed of.
    """
    before = {number: signal.signal(number, _let_pass) for number in _ENDING}
    try:
        with engine as opened:
            yield opened
        opened.wait_for_shutdown()  # it has stopped; this says whether it failed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def opening(
    open_engine: Callable[..., AbstractContextManager[Any]],
    way: Callable[[AbstractContextManager[Any]], AbstractContextManager[Any]],
) -> Callable[..., AbstractContextManager[Any]]:  # Any: an engine as a command takes it
    """Gives what opens an engine in one of the two ways."""

    def opened(*arguments: object) -> AbstractContextManager[Any]:  # Any: the same
        return way(open_engine(*arguments))

    return opened


def _let_pass(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
