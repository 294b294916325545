"""Calls from other threads: each is a task of the loop, and none is left without an outcome."""

import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import TaskStatus

from megallm.core_async.kit.call_queue import CallQueue
from tests.freed import without_collector

pytestmark = pytest.mark.anyio

ANSWER_S = 5.0


class BrokenError(Exception):
    """An error of the caller's own."""


class Value:
    """Something that can be watched as it goes."""


@asynccontextmanager
async def serving() -> AsyncGenerator[CallQueue]:
    """Serves a queue in the test's loop, and closes it."""
    queue = CallQueue()
    async with anyio.create_task_group() as tasks:
        await tasks.start(queue.serve)
        yield queue
        queue.close()


async def in_thread[*A, T](function: Callable[[*A], T], *args: *A) -> T:
    """Runs a function that blocks on another thread."""
    return await anyio.to_thread.run_sync(function, *args)


async def until_over[T](future: Future[T]) -> bool:
    """Waits on another thread until a call is over; says whether it was in time."""
    return bool((await in_thread(wait, [future], ANSWER_S)).done)


class Call:
    """A call that waits until it is cancelled, and then needs a while to clean up."""

    def __init__(self) -> None:
        self.has_begun = anyio.Event()
        self.may_end = anyio.Event()
        self.has_ended = False

    async def run(self) -> None:
        """Waits for ever."""
        try:
            self.has_begun.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.may_end.wait()
            self.has_ended = True


async def twice(number: int) -> int:
    """Gives a value after a while."""
    await anyio.lowlevel.checkpoint()
    return 2 * number


async def fail() -> None:
    """Raises."""
    await anyio.lowlevel.checkpoint()
    raise BrokenError("mine")


# ---- outcomes ------------------------------------------------------------------------------------


async def test_threads_get_the_values_of_their_calls() -> None:
    """They call at once, and each gets its own."""
    async with serving() as queue:
        futures = await in_thread(lambda: [queue.submit(twice, number) for number in range(50)])
        values = await in_thread(lambda: [future.result(ANSWER_S) for future in futures])
        assert values == [2 * number for number in range(50)]


async def test_an_error_is_the_callers_whole_and_the_queue_goes_on() -> None:
    """One caller's mistake must not end the others' loop."""
    async with serving() as queue:
        failed = queue.submit(fail)
        with pytest.raises(BrokenError, match="mine"):
            await in_thread(failed.result, ANSWER_S)
        assert await in_thread(queue.submit(twice, 3).result, ANSWER_S) == 6


async def test_calls_run_beside_each_other() -> None:
    """A long generation must not hold up a shutdown."""
    async with serving() as queue:
        call = Call()
        long = queue.submit(call.run)
        await call.has_begun.wait()
        assert await in_thread(queue.submit(twice, 3).result, ANSWER_S) == 6
        assert not long.done()
        call.may_end.set()


async def test_only_the_loops_own_thread_is_current() -> None:
    """There a call that is waited for would never end."""
    async with serving() as queue:
        assert queue.is_current
        assert not await in_thread(lambda: queue.is_current)


@pytest.mark.parametrize("outcome", ["value", "error"])
async def test_outcomes_are_freed_with_their_future_and_not_by_the_collector(outcome: str) -> None:
    """They hold tensors, streams and tracebacks, and the queue may be idle for hours after them."""
    made: list[weakref.ref[object]] = []

    async def make() -> object:
        value = BrokenError() if outcome == "error" else Value()
        made.append(weakref.ref(value))
        try:
            if isinstance(value, BrokenError):
                raise value
            return value
        finally:
            del value

    async with serving() as queue:
        with without_collector():
            future = queue.submit(make)
            while not future.done():
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert made[0]() is not None
            del future
            assert made[0]() is None


# ---- cancelling ----------------------------------------------------------------------------------


async def test_cancelling_the_future_cancels_its_call_and_no_other() -> None:
    """How a hosted `generate` is aborted."""
    async with serving() as queue:
        calls = [Call(), Call()]
        futures = [queue.submit(call.run) for call in calls]
        for call in calls:
            await call.has_begun.wait()
            call.may_end.set()
        assert futures[0].cancel()
        await anyio.wait_all_tasks_blocked()
        assert [call.has_ended for call in calls] == [True, False]
        assert not futures[1].done()


async def test_a_cancelled_call_can_be_waited_for() -> None:
    """Ctrl-C returns once the abort is through, and not before: `wait` says when the call is over."""
    async with serving() as queue:
        call = Call()
        future = queue.submit(call.run)
        await call.has_begun.wait()
        assert future.cancel()
        assert not (await in_thread(wait, [future], 0)).done
        call.may_end.set()
        assert await until_over(future)
        assert call.has_ended


async def test_a_call_cancelled_before_it_begins_can_be_waited_for_too() -> None:
    """Ctrl-C can come that early."""
    async with serving() as queue:
        call = Call()
        call.may_end.set()
        future = queue.submit(call.run)
        assert future.cancel()
        assert await until_over(future)


@pytest.mark.parametrize("raises", [False, True])
async def test_an_outcome_that_comes_after_a_cancel_is_dropped(raises: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """The call had no time to notice, and nobody wants what it gives."""
    async with serving() as queue:
        futures: list[Future[None]] = []

        async def end_in_spite() -> None:
            futures[0].cancel()
            if raises:
                raise BrokenError

        futures.append(queue.submit(end_in_spite))
        assert await until_over(futures[0])
        assert futures[0].cancelled()
        assert await in_thread(queue.submit(twice, 3).result, ANSWER_S) == 6


# ---- the end -------------------------------------------------------------------------------------


async def end_by_close(queue: CallQueue, _cancel: Callable[[], None]) -> None:
    """Ends a queue from another thread."""
    await in_thread(queue.close)
    await in_thread(queue.close)


async def end_by_cancel(_queue: CallQueue, cancel: Callable[[], None]) -> None:
    """Ends a queue as the loop's own end does."""
    cancel()


@pytest.mark.parametrize("end", [end_by_close, end_by_cancel])
async def test_the_end_cancels_what_runs_and_waits_for_it(
    end: Callable[[CallQueue, Callable[[], None]], Awaitable[None]],
) -> None:
    """Nobody waits for a loop that is gone, and no call is left running in it."""
    queue, call = CallQueue(), Call()
    call.may_end.set()
    future: Future[None] = Future()
    async with anyio.create_task_group() as tasks:
        await tasks.start(queue.serve)
        future = queue.submit(call.run)
        await call.has_begun.wait()
        await end(queue, tasks.cancel_scope.cancel)
    assert call.has_ended
    assert future.cancelled()
    assert wait([future], 0).done
    with pytest.raises(RuntimeError, match="the loop has ended"):
        queue.submit(twice, 3)


async def test_a_call_that_did_not_begin_before_the_end_is_cancelled() -> None:
    """It lies in the queue, or is still on its way to the loop."""
    queue = CallQueue()
    futures: list[Future[int]] = []
    async with anyio.create_task_group() as tasks:
        await tasks.start(queue.serve)
        queue.close()
        futures += [queue.submit(twice, number) for number in range(3)]
    assert all(future.cancelled() for future in futures)
    assert len(wait(futures, 0).done) == 3


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_call_that_meets_the_end_is_settled_wherever_it_is(num_turns: int) -> None:
    """Between the caller's thread and its task there are several stops."""
    queue = CallQueue()
    future: Future[int] = Future()
    async with anyio.create_task_group() as tasks:
        await tasks.start(queue.serve)
        future = queue.submit(twice, 3)
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert wait([future], 0).done
    assert future.cancelled() or future.result(0) == 6


async def test_threads_that_call_while_the_queue_ends_all_get_an_outcome() -> None:
    """The worst place to hang: an exit."""
    seen: list[str] = []
    half = threading.Semaphore(0)

    def call(queue: CallQueue) -> None:
        for number in range(200):
            try:
                done = wait([future := queue.submit(twice, number)], ANSWER_S).done
                seen.append("hung" if not done else "cancelled" if future.cancelled() else "value")
            except RuntimeError:
                seen.append("refused")
            half.release()

    async with anyio.create_task_group() as tasks:
        queue = CallQueue()
        await tasks.start(queue.serve)
        for _ in range(4):
            tasks.start_soon(in_thread, call, queue)
        await in_thread(lambda: [half.acquire(timeout=ANSWER_S) for _ in range(400)])
        queue.close()
    assert len(seen) == 800
    assert {"value", "refused"} <= set(seen) <= {"value", "cancelled", "refused"}


# ---- tasks that stay -----------------------------------------------------------------------------


async def test_a_task_that_stays_is_waited_for_until_it_is_ready_and_ends_with_the_queue() -> None:
    """The engine's own run is one."""
    events: list[str] = []

    async def stay(*, task_status: TaskStatus[None]) -> None:
        await anyio.lowlevel.checkpoint()
        events.append("ready")
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            events.append("ended")

    async with serving() as queue:
        await in_thread(queue.submit(queue.start_task, stay).result, ANSWER_S)
        assert events == ["ready"]
    assert events == ["ready", "ended"]


async def test_a_task_that_fails_before_it_is_ready_raises_and_leaves_the_queue_whole() -> None:
    """A start that fails is its caller's, who may try again."""

    async def break_down(*, task_status: TaskStatus[None]) -> None:
        raise BrokenError("no room")

    async with serving() as queue:
        started = queue.submit(queue.start_task, break_down)
        with pytest.raises(BrokenError, match="no room"):
            await in_thread(started.result, ANSWER_S)
        assert await in_thread(queue.submit(twice, 3).result, ANSWER_S) == 6


async def test_an_idle_queue_that_nobody_holds_is_freed() -> None:
    """A program may make many loops in its life."""
    queue = CallQueue()
    async with anyio.create_task_group() as tasks:
        await tasks.start(queue.serve)
        await in_thread(queue.submit(twice, 3).result, ANSWER_S)
        queue.close()
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None
