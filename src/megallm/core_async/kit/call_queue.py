"""Calls into a loop from other threads: each a future, each a task of its own, none an orphan."""

import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from math import inf
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from megallm.core_async.kit.foreign import poster


class CallQueue:
    """Runs calls that other threads submit as tasks of one group. Made in the loop that serves it."""

    def __init__(self) -> None:
        self._post = poster()
        self._thread = threading.current_thread()
        self._calls, self._received = anyio.create_memory_object_stream[
            Callable[[], Coroutine[Any, Any, None]]
        ](inf)
        self._tasks: TaskGroup | None = None
        self._unfinished: dict[Future[Any], Future[Any]] = {}
        """Whoever pops one, in the loop or on a caller's thread, is the one to drop it."""
        self._has_ended = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread, where waiting for a call would never end."""
        return threading.current_thread() is self._thread

    def submit[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Future[T]:
        """Starts a call in the loop, from any thread; cancelling the future cancels the call.

        The future is cancelled when the queue ends first. `concurrent.futures.wait` returns for a
        cancelled one once the call is over.
        Raises: RuntimeError when it has ended.
        """
        future: Future[T] = Future()
        self._unfinished[future] = future
        if self._has_ended:
            self._drop(future)
            raise RuntimeError("the loop has ended")
        self._post(lambda: self._enqueue(lambda: self._run(function, args, future), future))
        return future

    async def start_task(self, function: Callable[..., Coroutine[Any, Any, object]]) -> None:
        """Starts a task that lives until it ends or the queue does, and waits until it says that it is ready.

        Runs in the loop. Raises: what the task raised before it was ready.
        """
        assert self._tasks is not None, "the queue is not served"
        await self._tasks.start(function)

    def close(self) -> None:
        """Makes `serve` cancel what runs and return; callable from any thread, idempotent."""
        self._post(self._calls.close)

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs the calls, until `close` or a cancel."""
        try:
            async with self._calls, self._received, anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                async for call in self._received:
                    tasks.start_soon(call)
                    del call  # this frame would keep the last one, its arguments and its outcome
                tasks.cancel_scope.cancel()
        finally:
            self.end()

    def end(self) -> None:
        """Cancels every call that has not ended, and refuses more: the loop is over. Idempotent."""
        self._has_ended = True
        for future in list(self._unfinished):
            self._drop(future)

    def _enqueue(self, call: Callable[[], Coroutine[Any, Any, None]], future: Future[Any]) -> None:
        """Hands a call to the loop's task; one that comes after `close` is cancelled."""
        try:
            self._calls.send_nowait(call)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._drop(future)

    async def _run[*A, T](
        self, function: Callable[[*A], Awaitable[T]], args: tuple[*A], future: Future[T]
    ) -> None:
        """Runs one call and gives its outcome to the future, which its caller may have cancelled."""
        with anyio.CancelScope() as scope:
            future.add_done_callback(lambda done: self._post(scope.cancel) if done.cancelled() else None)
            try:
                value = await function(*args)
            except Exception as error:  # noqa: BLE001 - it is the caller's, whole
                _settle(future.set_exception, error, future.cancelled)
            else:
                _settle(future.set_result, value, future.cancelled)
            finally:
                self._drop(future)
                del future  # an error's traceback holds this frame: a cycle would keep both

    def _drop(self, future: Future[Any]) -> None:
        """Cancels a future that has no outcome: nothing works on it any more."""
        if self._unfinished.pop(future, None) is not None and future.cancel():
            future.set_running_or_notify_cancel()  # else concurrent.futures.wait() would wait for ever


def _settle[T](give: Callable[[T], None], outcome: T, was_cancelled: Callable[[], bool]) -> None:
    """Gives an outcome to a future unless its caller has cancelled it, perhaps this very moment."""
    try:
        give(outcome)
    except InvalidStateError:
        assert was_cancelled(), "a future was settled twice"
