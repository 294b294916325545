"""Starts tasks in order, stops them in reverse, and ends them all when one fails (one-for-all).

One-for-all because block ownership and device contents can't be rebuilt one actor at a time.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus


class Startable(Protocol):
    """A task that says when it is ready."""

    def __call__(self, *, task_status: TaskStatus[None]) -> Awaitable[None]: ...


class _Child:
    """One supervised task: the scope that stops it, and the event that says it has."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.has_ended = anyio.Event()


class Supervisor:
    """An async context manager round a task group whose children share one fate.

    Leaving the block stops the children, last started first, each before the next. So does a cancel
    from outside, which does not reach them on its own: cancelled all at once, one that asks another
    would see it gone, and take that for a failure. A failure cancels the block, and leaving it
    raises the failure itself, not an exception group.
    """

    def __init__(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        self.failure: Exception | None = None
        """The first exception any child raised."""
        self._on_failure = on_failure
        self._children: list[_Child] = []
        """Those that run, in the order of their starts."""
        self._tasks: TaskGroup | None = None
        self._block = self._run_block()

    async def __aenter__(self) -> Self:
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(exc_type, exc, traceback)

    async def start(self, name: str, run: Startable) -> None:
        """Starts a task and waits until it is ready. A cancel meanwhile reaches the task.

        Raises: what the task raised before it was ready.
        """
        assert self._tasks is not None
        child = _Child()

        async def watched(*, task_status: TaskStatus[None]) -> None:
            await self._watch(child, run, task_status)

        await self._tasks.start(watched, name=name)
        child.scope.shield = True

    async def stop(self) -> None:
        """Stops the children, last started first, each before the next; idempotent."""
        while self._children:
            child = self._children[-1]
            child.scope.cancel()
            await child.has_ended.wait()

    @asynccontextmanager
    async def _run_block(self) -> AsyncGenerator[None]:
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                finally:
                    await self._stop_for_good()
        except BaseExceptionGroup as group:
            first = self._first_of(group)
        else:
            return
        try:
            raise first
        finally:
            del first  # its traceback holds this frame

    async def _stop_for_good(self) -> None:
        try:
            with anyio.CancelScope(shield=True):  # the task group would wait for them all the same
                await self.stop()
        finally:  # a second, native asyncio cancel has come: no more order, but nobody stays
            for child in self._children:
                child.scope.cancel()

    def _first_of(self, group: BaseExceptionGroup) -> BaseException:
        """Gives the one error the caller sees; the group itself when it is not for us to choose."""
        _, errors = group.split(anyio.get_cancelled_exc_class())
        if errors is None:
            return group
        if self.failure is not None and errors.split(Exception)[1] is None:
            return self.failure
        return errors.exceptions[0] if len(errors.exceptions) == 1 else errors

    async def _watch(self, child: _Child, run: Startable, task_status: TaskStatus[None]) -> None:
        self._children.append(child)
        try:
            with child.scope:
                await run(task_status=task_status)
        except Exception as error:
            if self.failure is None:
                self.failure = error
                if self._on_failure is not None:
                    self._on_failure(error)
            raise
        finally:
            self._children.remove(child)
            child.has_ended.set()
