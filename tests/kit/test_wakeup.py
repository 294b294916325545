"""How a thread wakes the loop: no wake-up lost, none of a loop that is gone, no descriptor kept."""

import gc
import threading
from collections.abc import Callable

import anyio
import pytest

from megallm.core_async.kit.wakeup import Wakeup, open_wakeup
from tests.freed import open_descriptors
from tests.loops import EVERY_LOOP, Backend

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


def on_thread(function: Callable[[], object]) -> None:
    """Runs a function on another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


async def is_woken(wakeup: Wakeup) -> bool:
    """Whether a wait ends now: the loop is given a few turns, since a wake-up takes one or two."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_later, scope)
            await wakeup.wait()
            tasks.cancel_scope.cancel()
    return not scope.cancelled_caught


async def cancel_later(scope: anyio.CancelScope) -> None:
    """Cancels a scope some turns of the loop from now."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def test_a_wake_ends_the_wait() -> None:
    """The thread's answers are of use only once the loop looks at them."""
    wakeup = open_wakeup()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wakeup.wait)
        await anyio.lowlevel.checkpoint()
        on_thread(wakeup.wake)
    wakeup.close()


@pytest.mark.parametrize("num_turns", [0, 3])
async def test_a_wake_before_the_wait_is_kept(num_turns: int) -> None:
    """The loop looks for news, finds none, and begins to wait: what comes in between must not be lost."""
    wakeup = open_wakeup()
    on_thread(wakeup.wake)
    for _ in range(num_turns):
        await anyio.lowlevel.checkpoint()
    await wakeup.wait()
    wakeup.close()


async def test_nothing_but_a_wake_ends_the_wait() -> None:
    """An idle engine sleeps."""
    wakeup = open_wakeup()
    assert not await is_woken(wakeup)
    wakeup.close()


async def test_wakes_in_a_burst_end_one_wait() -> None:
    """The reader takes all there is at each wake-up, so that a burst costs one."""
    wakeup = open_wakeup()
    on_thread(lambda: [wakeup.wake() for _ in range(100)])
    await wakeup.wait()
    assert not await is_woken(wakeup)
    on_thread(wakeup.wake)
    assert await is_woken(wakeup)
    wakeup.close()


async def test_a_cancelled_wait_leaves_the_wake_there() -> None:
    """The one who stops the thread waits next, for the same news."""
    wakeup = open_wakeup()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
    on_thread(wakeup.wake)
    has_waited = False
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
        has_waited = True  # asyncio heard of the wake-up before it heard of the cancel
    assert has_waited or await is_woken(wakeup)
    wakeup.close()


async def test_wakes_of_a_busy_thread_are_all_noticed() -> None:
    """Ten thousand answers, posted as fast as a thread can: the last one is seen."""
    wakeup = open_wakeup()
    posted: list[int] = []

    def post() -> None:
        for number in range(10_000):
            posted.append(number)
            wakeup.wake()

    thread = threading.Thread(target=post)
    thread.start()
    while len(posted) < 10_000:
        await wakeup.wait()
    thread.join()
    wakeup.close()


async def test_a_closed_wakeup_holds_no_descriptor() -> None:
    """One is made for every start of an engine."""
    before = open_descriptors()
    wakeup = open_wakeup()
    wakeup.wake()
    wakeup.close()
    assert open_descriptors() == before


async def test_a_wakeup_that_nobody_closed_is_closed_when_it_is_dropped() -> None:
    """A thread that was left behind keeps it until it ends; nobody else can close it then."""
    gc.collect()
    before = open_descriptors()
    wakeup = open_wakeup()
    wakeup.wake()
    await wakeup.wait()
    del wakeup
    assert open_descriptors() == before


def test_a_wake_of_a_loop_that_is_gone_does_nothing(anyio_backend: Backend) -> None:
    """A thread that was left behind ends in its own time; it must not fail of it."""

    async def open_one() -> Wakeup:
        return open_wakeup()

    backend, options = anyio_backend
    wakeup = anyio.run(open_one, backend=backend, backend_options=options)
    on_thread(wakeup.wake)
    wakeup.wake()
    wakeup.close()
