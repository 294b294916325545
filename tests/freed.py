"""Whether an error is freed as soon as it was handled, or kept by a cycle until the collector runs."""

import gc
import weakref
from collections.abc import Awaitable, Generator
from contextlib import contextmanager

import pytest


@contextmanager
def without_collector() -> Generator[None]:
    """Keeps the garbage collector from running in the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def watch_error(awaitable: Awaitable[object], kind: type[Exception]) -> weakref.ref[Exception]:
    """Gives a weak reference to the error that is raised; a builtin's can't be watched, a subclass's can."""
    try:
        await awaitable
    except kind as error:
        return weakref.ref(error)
    pytest.fail(f"no {kind.__name__} was raised")
