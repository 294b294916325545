"""Crossings between a loop and other threads: calls posted to a loop, futures waited for in one."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import anyio
import sniffio
import trio


async def wait_for[T](future: Future[T]) -> T:
    """Waits for the future without a thread of its own; a cancel cancels the future as well.

    Raises: what the future was failed with.
    """
    done = anyio.Event()
    post = poster()
    future.add_done_callback(lambda _: post(done.set))
    try:
        await done.wait()
    finally:
        future.cancel()
    try:
        return future.result()
    finally:
        del future  # an error's traceback holds this frame: a cycle would keep both, and all they hold


async def on_own_thread[T](function: Callable[[], T]) -> T:
    """Gives what a function returns that may block for minutes, on a thread that is made for it.

    A cancel leaves the thread behind, and the end of the program does not wait for it: for blocking in
    what may never answer. Raises: what the function raises.
    """
    return await wait_for(_called(function))


def poster() -> Callable[[Callable[[], object]], None]:
    """Gives what runs a callback in the running loop soon, from any thread, and never once that is gone."""
    if sniffio.current_async_library() == "trio":
        token = trio.lowlevel.current_trio_token()

        def post_trio(callback: Callable[[], object]) -> None:
            try:
                token.run_sync_soon(callback)
            except trio.RunFinishedError:
                return

        return post_trio
    loop = asyncio.get_running_loop()

    def post_asyncio(callback: Callable[[], object]) -> None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not loop.is_closed():
                raise

    return post_asyncio


def _called[T](function: Callable[[], T]) -> Future[T]:
    """Calls a function on a thread of its own."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that who no longer waits can't cancel what will be completed
    threading.Thread(target=_complete, args=(future, function), name="megallm-call", daemon=True).start()
    return future


def _complete[T](future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - who waits raises it
        future.set_exception(error)
    finally:
        del future  # an error's traceback holds this frame
