"""A private event loop on a thread of its own, for callers that have no loop or the wrong one.

The thread is a daemon, so that a program that forgets to close its engine still ends; whoever owns
a `LoopThread` stops it. Knows no engine.
"""

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Literal

import anyio
from anyio.from_thread import BlockingPortal

type Backend = Literal["asyncio", "trio"]

JOIN_S = 15.0
"""How long `stop` waits for the thread: longer than any actor takes to stop."""


class LoopThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self, backend: Backend = "asyncio") -> None:
        """Starts the thread and waits until its loop runs.

        `backend` asyncio runs on uvloop where that can be imported.
        Raises: ValueError for a backend that is not known.
        """
        if backend not in ("asyncio", "trio"):
            raise ValueError(f'loop is {backend!r}; it must be "asyncio" or "trio"')
        self._backend = backend
        self._ready: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._main, name="megallm-loop", daemon=True)
        self._thread.start()
        self._portal = self._ready.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def start(self, function: Callable[..., Awaitable[object]]) -> None:
        """Starts a task in the loop and waits until it says that it is ready (anyio's `task_status`).

        Raises: what the task raised before that.
        """
        self._portal.start_task(function)

    def submit[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Future[T]:
        """Starts a call in the loop; cancelling the future cancels the call.

        Raises: RuntimeError when the loop has stopped.
        """
        return self._portal.start_task_soon(function, *args)

    def stop(self) -> None:
        """Cancels what runs in the loop, ends it, and joins the thread; idempotent."""
        if self._thread.is_alive() and not self.is_current:
            self._portal.call(self._portal.stop, True)  # noqa: FBT003 - anyio's signature: cancel_remaining
            self._thread.join(JOIN_S)

    def _main(self) -> None:
        options = {"use_uvloop": find_spec("uvloop") is not None} if self._backend == "asyncio" else {}
        try:
            anyio.run(self._serve, backend=self._backend, backend_options=options)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the start
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._ready.set_result(portal)
            await portal.sleep_until_stopped()
