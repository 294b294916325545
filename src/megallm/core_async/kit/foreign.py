"""Crossings between a loop and other threads: calls posted to a loop, futures waited for in one."""

import asyncio
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
