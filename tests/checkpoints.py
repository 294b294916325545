"""Cancels a coroutine where a test wants it: at its n-th await, so that a test can try them all."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any


class AtAwait[T](Awaitable[T]):
    """Runs a coroutine and calls `act` once, as it suspends for the n-th time, counted from 1."""

    def __init__(self, nth: int, coroutine: Coroutine[Any, Any, T], act: Callable[[], object]) -> None:
        self._nth = nth
        self._coroutine = coroutine
        self._act = act

    def __await__(self) -> Generator[Any, Any, T]:  # Any: what a loop and its tasks say to each other
        num_awaits = 0
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                trap = resume()
            except StopIteration as stop:
                return stop.value
            num_awaits += 1
            if num_awaits == self._nth:
                self._act()
            try:
                answer = yield trap
            except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, answer)
