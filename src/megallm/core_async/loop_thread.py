"""A private event loop on a thread of its own, for callers that have no loop or another one.

anyio's blocking portal does not serve: its calls are refused on a thread that runs trio, and its
thread keeps a program alive whose owner forgot it. This thread is a daemon. Knows no engine.
"""

import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from importlib.util import find_spec
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from megallm.core_async.kit.foreign import poster

type Backend = Literal["asyncio", "trio"]

JOIN_S = 15.0
"""How long `stop` waits for the thread: longer than any actor takes to stop."""


class LoopThread:
    """A thread that runs an event loop until `stop`. Every method may be called from any thread."""

    def __init__(self, backend: Backend = "asyncio") -> None:
        """Starts the thread and waits until its loop runs.

        `backend` asyncio runs on uvloop where that can be imported.
        Raises: ValueError for a backend that is not known.
        """
        if backend not in ("asyncio", "trio"):
            raise ValueError(f'loop is {backend!r}; it must be "asyncio" or "trio"')
        self._backend = backend
        self._started: Future[None] = Future()
        self._unfinished: set[Future[object]] = set()
        self._has_ended = False
        self._thread = threading.Thread(target=self._main, name="megallm-loop", daemon=True)
        self._thread.start()
        self._started.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def submit[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Future[T]:
        """Starts a call in the loop; cancelling the future cancels the call.

        The future is cancelled when the loop ends first.
        Raises: RuntimeError when the loop has ended.
        """
        future: Future[T] = Future()
        self._unfinished.add(future)  # type: ignore[arg-type] - only ever cancelled from there
        future.add_done_callback(self._unfinished.discard)
        if self._has_ended:
            future.cancel()
            raise RuntimeError("the loop has ended")
        self._post(lambda: self._calls.send_nowait(lambda: self._run(function, args, future)))
        return future

    async def start_task(self, function: Callable[..., Awaitable[object]]) -> None:
        """Starts a task that lives until it ends or the loop stops, and waits until it says that it is ready.

        To be submitted. Raises: what the task raised before it was ready.
        """
        await self._tasks.start(function)

    def stop(self) -> None:
        """Cancels what runs in the loop, ends it, and joins the thread unless called on it; idempotent."""
        self._post(self._calls.close)
        if not self.is_current:
            self._thread.join(JOIN_S)

    async def _run[*A, T](self, function: Callable[[*A], Awaitable[T]], args: tuple[*A], future: Future[T]) -> None:
        """Runs one submitted call and gives its outcome to the future, which its caller may have cancelled."""
        with anyio.CancelScope() as scope:
            future.add_done_callback(lambda _: self._post(scope.cancel) if future.cancelled() else None)
            try:
                value = await function(*args)
            except Exception as error:  # noqa: BLE001 - it is the caller's, whole
                _settle(future, lambda: future.set_exception(error))
            else:
                _settle(future, lambda: future.set_result(value))
            finally:
                future.cancel()

    def _main(self) -> None:
        options = {"use_uvloop": find_spec("uvloop") is not None} if self._backend == "asyncio" else {}
        try:
            anyio.run(self._serve, backend=self._backend, backend_options=options)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the start
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._has_ended = True
            for future in list(self._unfinished):
                future.cancel()

    async def _serve(self) -> None:
        self._post = poster()
        self._calls, calls = anyio.create_memory_object_stream[Callable[[], Awaitable[None]]](math.inf)
        async with self._calls, calls, anyio.create_task_group() as tasks:
            self._tasks: TaskGroup = tasks
            self._started.set_result(None)
            async for call in calls:
                tasks.start_soon(call)
            tasks.cancel_scope.cancel()


def _settle(future: Future[object], give: Callable[[], None]) -> None:
    """Gives an outcome to a future unless its caller has cancelled it, perhaps this very moment."""
    try:
        give()
    except InvalidStateError:
        assert future.cancelled(), "a future was settled twice"
