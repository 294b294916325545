"""Starts tasks in order, stops them in reverse, and ends them all when one fails (one-for-all).

One-for-all because block ownership and device contents can't be rebuilt one actor at a time.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus


class Startable(Protocol):
    """A task that says when it is ready."""

    def __call__(self, *, task_status: TaskStatus[None]) -> Awaitable[None]: ...


class _Child:
    """One supervised task: the scope that stops it, and the event that says it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = anyio.CancelScope()
        self.has_ended = anyio.Event()


class Supervisor:
    """An async context manager round a task group whose children share one fate.

    `failure` is the first exception any child raised. Leaving the block without `stop` cancels
    the children all at once. A failure cancels the block, and leaving it raises the failure itself,
    not an exception group.
    """

    def __init__(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        self.failure: Exception | None = None
        self._on_failure = on_failure
        self._children: list[_Child] = []
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> bool | None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(exc_type, exc, traceback)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            if self.failure is None or group.split(Exception)[1] is not None:
                raise
            raise self.failure from self.failure.__cause__

    async def start(self, name: str, run: Startable) -> None:
        """Starts a task and waits until it is ready.

        Raises: what the task raised before it was ready.
        """
        assert self._tasks is not None
        child = _Child(name)
        self._children.append(child)

        async def watched(*, task_status: TaskStatus[None]) -> None:
            await self._watch(child, run, task_status)

        await self._tasks.start(watched, name=name)

    async def stop(self) -> None:
        """Stops the children, last started first, each before the next; idempotent."""
        while self._children:
            child = self._children[-1]
            child.scope.cancel()
            await child.has_ended.wait()
            self._children.pop()

    async def _watch(self, child: _Child, run: Startable, task_status: TaskStatus[None]) -> None:
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
            child.has_ended.set()
