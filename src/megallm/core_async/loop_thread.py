"""A private event loop on a thread of its own, for callers that have no loop or another one.

anyio's blocking portal does not serve: its calls are refused on a thread that runs trio, and its
thread keeps a program alive whose owner forgot it. This thread is a daemon. Knows no engine.
"""

import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, Literal

import anyio

from megallm.core_async.kit.call_queue import CallQueue

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
        started: Future[CallQueue] = Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="megallm-loop", daemon=True)
        self._thread.start()
        self._calls = started.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return self._calls.is_current

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def submit[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Future[T]:
        """Starts a call in the loop; cancelling the future cancels the call.

        The future is cancelled when the loop ends first.
        Raises: RuntimeError when the loop has ended.
        """
        return self._calls.submit(function, *args)

    async def start_task(self, function: Callable[..., Coroutine[Any, Any, object]]) -> None:
        """Starts a task that lives until it ends or the loop stops, and waits until it says that it is ready.

        To be submitted. Raises: what the task raised before it was ready.
        """
        await self._calls.start_task(function)

    def stop(self) -> None:
        """Cancels what runs in the loop, ends it, and joins the thread unless called on it; idempotent."""
        self._calls.close()
        if not self.is_current:
            self._thread.join(JOIN_S)

    def _main(self, started: "Future[CallQueue]") -> None:
        options = {"use_uvloop": find_spec("uvloop") is not None} if self._backend == "asyncio" else {}
        try:
            anyio.run(self._serve, started, backend=self._backend, backend_options=options)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: "Future[CallQueue]") -> None:
        calls = CallQueue()
        started.set_result(calls)
        await calls.serve()
