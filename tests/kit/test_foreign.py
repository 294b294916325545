"""Crossings between a loop and other threads: nothing lost, nothing raised by a loop that is gone."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import anyio
import pytest

from megallm.core_async.kit.foreign import on_own_thread, poster, wait_for
from tests.checkpoints import AtAwait
from tests.freed import watch_error, without_collector
from tests.loops import EVERY_LOOP, Backend

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


class FailedError(Exception):
    """What the other thread fails with."""


def on_thread(function: Callable[[], object]) -> None:
    """Runs a function on another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


async def test_a_future_is_waited_for_until_another_thread_completes_it() -> None:
    """The caller's loop goes on meanwhile."""
    future: Future[int] = Future()

    async def complete() -> None:
        await anyio.lowlevel.checkpoint()
        on_thread(lambda: future.set_result(5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete)
        assert await wait_for(future) == 5


@pytest.mark.parametrize("outcome", [3, FailedError("no")], ids=["value", "error"])
async def test_a_future_that_is_done_is_no_special_case(outcome: int | FailedError) -> None:
    """The other thread may be quicker."""
    future: Future[int] = Future()
    if isinstance(outcome, int):
        future.set_result(outcome)
        assert await wait_for(future) == outcome
    else:
        future.set_exception(outcome)
        with pytest.raises(FailedError, match="no") as caught:
            await wait_for(future)
        assert caught.value is outcome


async def test_a_blocking_call_has_a_thread_that_no_exit_waits_for() -> None:
    """Its result and its error come back."""

    def fail() -> None:
        raise FailedError("no")

    thread = await on_own_thread(threading.current_thread)
    assert thread.daemon
    assert thread is not threading.current_thread()
    with pytest.raises(FailedError, match="no"):
        await on_own_thread(fail)


async def test_a_cancel_leaves_a_blocking_call_behind() -> None:
    """What it comes to is nobody's: an error of its thread would be printed as one of the program."""
    has_begun, may_end, threads = anyio.Event(), threading.Event(), list[threading.Thread]()
    post = poster()

    def block() -> None:
        threads.append(threading.current_thread())
        post(has_begun.set)
        may_end.wait(10)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_own_thread, block)
        await has_begun.wait()
        tasks.cancel_scope.cancel()
    assert threads[0].is_alive()
    may_end.set()
    threads[0].join()


async def test_the_error_of_a_blocking_call_is_freed_at_once() -> None:
    """What its traceback holds may be large."""
    threads: list[threading.Thread] = []

    def fail() -> None:
        threads.append(threading.current_thread())
        raise FailedError("no")

    with without_collector():
        error = await watch_error(on_own_thread(fail), FailedError)
        threads[0].join()
        assert error() is None


async def test_a_cancel_cancels_the_future() -> None:
    """Whoever works on it in the other thread has to hear that nobody waits any more."""
    future: Future[int] = Future()
    with anyio.CancelScope() as scope:
        await AtAwait(1, wait_for(future), scope.cancel)
    assert scope.cancelled_caught
    assert future.cancelled()


async def test_a_completion_that_comes_with_the_cancel_harms_nobody() -> None:
    """The loop hears of both; the outcome is dropped."""
    future: Future[int] = Future()

    def race() -> None:
        scope.cancel()
        on_thread(lambda: future.set_result(5))

    with anyio.CancelScope() as scope:
        await AtAwait(1, wait_for(future), race)
    assert future.result() == 5
    await anyio.wait_all_tasks_blocked()


async def test_a_future_cancelled_by_the_other_side_says_so() -> None:
    """It is not a cancel of the waiting task, which would have to stop."""
    future: Future[int] = Future()
    on_thread(future.cancel)
    with pytest.raises(CancelledError):
        await wait_for(future)


async def test_an_error_leaves_no_cycle() -> None:
    """A cycle through the future would keep the caller's frames, and all they hold."""
    future: Future[int] = Future()
    future.set_exception(FailedError())
    with without_collector():
        watched = await watch_error(wait_for(future), FailedError)
        del future
        assert watched() is None


async def test_callbacks_run_in_the_loop_and_in_order() -> None:
    """Whatever a thread posts may touch what only the loop may touch."""
    post = poster()
    seen: list[tuple[int, str]] = []
    is_over = anyio.Event()

    def post_all() -> None:
        for number in range(100):
            post(lambda number=number: seen.append((number, threading.current_thread().name)))
        post(is_over.set)

    on_thread(post_all)
    await is_over.wait()
    assert seen == [(number, threading.current_thread().name) for number in range(100)]


def test_a_post_to_a_loop_that_is_gone_does_nothing(anyio_backend: Backend) -> None:
    """A stream that is collected late aborts a request of an engine that has long ended."""

    async def give_poster() -> Callable[[Callable[[], object]], None]:
        return poster()

    backend, options = anyio_backend
    post = anyio.run(give_poster, backend=backend, backend_options=options)
    called: list[int] = []
    on_thread(lambda: post(lambda: called.append(1)))
    post(lambda: called.append(2))
    assert called == []


def test_a_future_completed_after_the_loop_has_ended_harms_nobody(
    anyio_backend: Backend,
) -> None:
    """The thread that completes it can't know."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()  # from now on it can't be cancelled

    async def give_up() -> None:
        with anyio.CancelScope() as scope:
            await AtAwait(1, wait_for(future), scope.cancel)

    backend, options = anyio_backend
    anyio.run(give_up, backend=backend, backend_options=options)
    on_thread(lambda: future.set_result(5))
    assert future.result() == 5
