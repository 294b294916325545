"""A private loop on its own thread: calls from anywhere, whatever loop the caller has, and no orphan."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, cast

import anyio
import pytest
import sniffio
import trio

from megallm.core_async.loop_thread import Backend, LoopThread

ANSWER_S = 5.0
"""How long an answer may take on a busy machine; none takes a millisecond on a quiet one."""


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Runs a test over each kind of private loop."""
    return request.param


@pytest.fixture
def loop(backend: Backend) -> Any:  # Any: a generator fixture
    """Gives a running loop thread, stopped afterwards."""
    thread = LoopThread(backend)
    yield thread
    thread.stop()
    assert not thread.is_alive
    assert [each for each in threading.enumerate() if each.name.startswith("megallm")] == []


async def double(value: int) -> int:
    """Gives twice the value, after a turn of the loop."""
    await anyio.lowlevel.checkpoint()
    return 2 * value


async def forever() -> None:
    """Never ends by itself."""
    await anyio.sleep_forever()


class BrokenError(Exception):
    """What a call raises."""


async def broken() -> None:
    """Fails."""
    raise BrokenError


# ---- calls -------------------------------------------------------------------------------------


def test_a_call_runs_in_the_loop_that_was_asked_for(loop: LoopThread, backend: Backend) -> None:
    """A user who asks for trio has trio code to run there."""

    async def library() -> str:
        return sniffio.current_async_library()

    assert loop.submit(library).result(ANSWER_S) == backend
    assert loop.is_alive
    assert not loop.is_current


def test_calls_run_side_by_side(loop: LoopThread) -> None:
    """One that waits for another must not wait for ever."""
    event = loop.submit(make_event).result(ANSWER_S)
    waiting = loop.submit(event.wait)
    loop.submit(set_event, event).result(ANSWER_S)
    waiting.result(ANSWER_S)


async def make_event() -> anyio.Event:
    """Gives an event of the loop."""
    return anyio.Event()


async def set_event(event: anyio.Event) -> None:
    """Sets it."""
    event.set()


def test_an_error_reaches_the_caller_and_ends_nothing_else(loop: LoopThread) -> None:
    """A failing call is its caller's business."""
    with pytest.raises(BrokenError):
        loop.submit(broken).result(ANSWER_S)
    assert loop.submit(double, 4).result(ANSWER_S) == 8


def test_cancelling_the_future_cancels_the_call(loop: LoopThread) -> None:
    """How Ctrl-C and timeouts reach the engine."""
    left = threading.Event()

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            left.set()

    began = threading.Event()

    async def begin_and_wait() -> None:
        began.set()
        await wait()

    future = loop.submit(begin_and_wait)
    assert began.wait(ANSWER_S)
    assert future.cancel()
    assert left.wait(ANSWER_S)


def test_whoever_waits_for_a_cancelled_call_sees_when_its_cleanup_is_over(loop: LoopThread) -> None:
    """Ctrl-C waits for the abort, and for no fixed time: `wait` returns once the call has unwound."""
    began, may_end = threading.Event(), threading.Event()
    has_ended: list[bool] = []

    async def clean_up() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(may_end.wait)
            has_ended.append(True)

    future = loop.submit(clean_up)
    assert began.wait(ANSWER_S)
    future.cancel()
    assert wait_for_futures([future], 0.05).not_done == {future}
    may_end.set()
    assert wait_for_futures([future], ANSWER_S).done == {future}
    assert has_ended == [True]


def test_a_cancel_that_comes_too_late_changes_nothing(loop: LoopThread) -> None:
    """The result is there, and stays."""
    future = loop.submit(double, 4)
    assert future.result(ANSWER_S) == 8
    assert not future.cancel()
    assert future.result(0) == 8


def test_calls_of_many_threads_each_get_their_own_answer(loop: LoopThread) -> None:
    """Worker pools call at once."""
    answers: dict[int, int] = {}

    def call(base: int) -> None:
        for value in range(base, base + 50):
            answers[value] = loop.submit(double, value).result(ANSWER_S)

    threads = [threading.Thread(target=call, args=(1000 * index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 400
    assert all(answer == 2 * value for value, answer in answers.items())


@pytest.mark.parametrize("outer", ["asyncio", "trio"])
def test_a_caller_may_sit_in_a_loop_of_its_own(loop: LoopThread, outer: str) -> None:
    """A notebook, a trio program: their loop stalls meanwhile, and nothing else."""

    async def call() -> int:
        return loop.submit(double, 21).result(ANSWER_S)

    assert anyio.run(call, backend=outer) == 42
    assert (asyncio.run(call()) if outer == "asyncio" else trio.run(call)) == 42


def test_a_call_knows_that_it_is_in_the_loop(loop: LoopThread) -> None:
    """Waiting for the loop from there would never end; the host refuses it."""

    async def ask() -> bool:
        return loop.is_current

    assert loop.submit(ask).result(ANSWER_S) is True


# ---- tasks -------------------------------------------------------------------------------------


def test_a_task_lives_until_the_loop_stops(backend: Backend) -> None:
    """The engine is one."""
    loop = LoopThread(backend)
    log: list[str] = []

    async def task(*, task_status: Any) -> None:  # Any: anyio's TaskStatus
        log.append("starting")
        await anyio.lowlevel.checkpoint()
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            log.append("stopped")

    loop.submit(loop.start_task, task).result(ANSWER_S)
    assert log == ["starting"]
    loop.stop()
    assert log == ["starting", "stopped"]


def test_a_task_that_fails_to_start_says_so(loop: LoopThread) -> None:
    """And leaves the loop running."""

    async def task(*, task_status: Any) -> None:  # Any: anyio's TaskStatus
        raise BrokenError

    with pytest.raises(BrokenError):
        loop.submit(loop.start_task, task).result(ANSWER_S)
    assert loop.submit(double, 1).result(ANSWER_S) == 2


# ---- the end -----------------------------------------------------------------------------------


def test_stop_cancels_what_runs_and_what_comes(backend: Backend) -> None:
    """Nobody waits for a loop that is gone."""
    loop = LoopThread(backend)
    pending = [loop.submit(forever) for _ in range(3)]
    loop.submit(double, 1).result(ANSWER_S)
    loop.stop()
    for future in pending:
        with pytest.raises(CancelledError):
            future.result(ANSWER_S)
    with pytest.raises(RuntimeError, match="the loop has ended"):
        loop.submit(double, 1)
    loop.stop()


def test_calls_that_race_with_stop_all_end(backend: Backend) -> None:
    """Each is answered, cancelled or refused; none hangs."""
    for _ in range(5):
        loop = LoopThread(backend)
        futures: list[Future[int]] = []

        def call(loop: LoopThread = loop, futures: list[Future[int]] = futures) -> None:
            with contextlib.suppress(RuntimeError):
                for value in range(200):
                    futures.append(loop.submit(double, value))  # noqa: PERF401 - until it refuses

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        loop.stop()
        for thread in threads:
            thread.join()
        for future in futures:
            assert future.cancelled() or future.result(ANSWER_S) % 2 == 0


def test_stop_may_be_called_by_several_threads(backend: Backend) -> None:
    """And returns for each of them when the thread is gone."""
    loop = LoopThread(backend)
    threads = [threading.Thread(target=loop.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_S)
        assert not thread.is_alive()
    assert not loop.is_alive


def test_stop_from_the_loop_itself_only_asks(backend: Backend) -> None:
    """A finaliser may run there; joining its own thread would raise."""
    loop = LoopThread(backend)

    async def stop() -> None:
        loop.stop()

    loop.submit(stop)
    loop.stop()
    assert not loop.is_alive


def test_an_unknown_loop_is_refused_and_starts_no_thread() -> None:
    """A misspelt name must not become the default."""
    with pytest.raises(ValueError, match=r'loop is \'curio\'; it must be "asyncio" or "trio"'):
        LoopThread(cast("Backend", "curio"))  # cast: a wrong value on purpose
    assert [each for each in threading.enumerate() if each.name.startswith("megallm")] == []


def test_the_thread_does_not_keep_the_program_alive(loop: LoopThread) -> None:
    """A program whose author forgot to close the engine still ends."""
    (thread,) = (each for each in threading.enumerate() if each.name == "megallm-loop")
    assert thread.daemon


def test_the_callers_context_stays_the_callers(loop: LoopThread) -> None:
    """A context variable set in the loop must not show up in the caller."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def set_it() -> int:
        variable.set(5)
        return variable.get()

    assert loop.submit(set_it).result(ANSWER_S) == 5
    assert variable.get() == 0
