"""An engine on a private loop thread, for callers with no loop of their own or with another one."""

import os
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineStoppedError, LifecycleError
from megallm.core_async.kit.foreign import wait_for
from megallm.core_async.loop_thread import Backend, LoopThread

ABORT_S = 0.9
"""How long an interrupted call waits for its abort: Ctrl-C is to be back within a second."""


class EngineHost:
    """Runs one engine on a loop thread. Every method may be called from any other thread."""

    def __init__(self, engine: Engine, backend: Backend) -> None:
        """Starts the engine and waits until it is ready.

        Raises: what the engine's start raised; nothing is left running then.
        """
        self._engine = engine
        self._process = os.getpid()
        self._loop = LoopThread(backend)
        try:
            self._loop.submit(self._loop.start_task, engine.run).result()
        except BaseException:
            self._loop.stop()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._loop.is_alive

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the engine's loop."""
        return self._loop.is_current

    @property
    def is_here(self) -> bool:
        """Whether the engine runs in this process: a fork of it has no thread but the one that forked."""
        return os.getpid() == self._process

    def submit[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Future[T]:
        """Starts a call in the engine's loop; cancelling the future cancels it.

        Raises: EngineStoppedError or EngineDeadError when the loop has ended; LifecycleError in a fork.
        """
        if not self.is_here:
            raise LifecycleError(
                f"the engine runs in process {self._process}, and process {os.getpid()} is a fork of it;"
                " start an engine here, or fork before"
            )
        try:
            return self._loop.submit(function, *args)
        except RuntimeError as refusal:
            error = self._engine.error()
            raise error from error.__cause__ or refusal

    def call[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> T:
        """Makes a call in the engine's loop and waits for it. Interrupted (Ctrl-C), it aborts the call first.

        Raises: what the call raised. RuntimeError when called from the loop itself, which would
        wait for ever.
        """
        if self._loop.is_current:
            raise RuntimeError(
                "called from the engine's own loop, which would wait for itself; await the async method"
            )
        future = self.submit(function, *args)
        try:
            return future.result()
        except CancelledError as cancelled:
            error = self._engine.error()
            raise error from error.__cause__ or cancelled
        finally:
            if not future.done():
                future.cancel()
                wait_for_futures([future], ABORT_S)
            del future  # its error's traceback holds this frame

    async def call_from_loop[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> T:
        """Makes a call in the engine's loop from another loop, and waits for it. A cancel cancels the call.

        Raises: what the call raised; EngineStoppedError and EngineDeadError also where the loop ended first.
        """
        try:
            return await wait_for(self.submit(function, *args))
        except CancelledError as cancelled:
            error = self._engine.error()
            raise error from error.__cause__ or cancelled

    def submit_coroutine[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine object in the engine's loop; see `submit`. One that can't start is closed."""
        try:
            return self.submit(_awaited, coroutine)
        except BaseException:
            coroutine.close()
            raise

    def run_coroutine[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine object in the engine's loop and waits for it; see `call`."""
        try:
            return self.call(_awaited, coroutine)
        finally:
            coroutine.close()

    def wait_for_shutdown(self) -> None:
        """Blocks until the engine has stopped.

        Raises: EngineDeadError when it failed.
        """
        try:
            self.call(self._engine.wait_for_shutdown)
        except EngineStoppedError:
            return

    def close(self) -> None:
        """Stops the engine and the loop, and joins the thread; idempotent.

        On the loop's own thread, where a forgotten owner may be collected, it only asks for the stop.
        In a fork of the process there is nothing to stop.
        """
        if not self.is_here:
            return
        try:
            stopped = self._loop.submit(self._engine.shutdown)
        except RuntimeError:  # the loop has ended: another thread has closed the host
            self._loop.stop()
            return
        if self._loop.is_current:
            stopped.add_done_callback(lambda _: self._loop.stop())
        else:
            wait_for_futures([stopped])
            self._loop.stop()

    def close_with(self, owner: object) -> "weakref.finalize[[EngineHost, str], object]":
        """Closes the host when `owner` is collected, or at exit; whoever closes it detaches the finaliser."""
        return weakref.finalize(owner, _close_forgotten, self, type(owner).__name__)


async def _awaited[T](coroutine: Coroutine[Any, Any, T]) -> T:
    return await coroutine


def _close_forgotten(host: EngineHost, name: str) -> None:
    if not host.is_here:
        return
    if threading.current_thread() is threading.main_thread():  # as at exit, when no thread can start
        host.close()
    else:  # the collector may run on a thread that is to be joined
        threading.Thread(target=host.close, name="megallm-close", daemon=True).start()
    warnings.warn(f"a {name} was dropped without shutdown(); it was stopped", ResourceWarning, stacklevel=2)
