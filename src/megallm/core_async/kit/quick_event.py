"""Events for what happens thousands of times a second: the loop's own, with nothing round them.

An `anyio.Event` looks for the running loop's backend as it is made, and is two objects deep: of the
microseconds that a streamed token costs, that would be a tenth.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import sniffio
import trio


class QuickEvent(Protocol):
    """Lets one task wait until something has happened. Lives in one loop."""

    def set(self) -> object:
        """Lets the task go on. Idempotent; nobody need wait."""
        ...

    async def wait(self) -> None:
        """Waits until it is set; one task, once."""
        ...


def event_maker() -> Callable[[], QuickEvent]:
    """Gives what makes events of the running loop."""
    return trio.Event if sniffio.current_async_library() == "trio" else _FutureEvent


class _FutureEvent:
    """An event of asyncio's. A cancel while it is waited for is the end of it."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        await self._future
