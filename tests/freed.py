"""What was freed: errors, which a cycle keeps until the collector runs, and descriptors."""

import gc
import weakref
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from pathlib import Path

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


def open_descriptors() -> set[str]:
    """Gives what this process has open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}
