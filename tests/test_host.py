"""An engine on a private loop thread, held from other threads."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import anyio
import pytest

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.host import EngineHost
from megallm.core_async.loop_thread import Backend
from megallm.core_async.messages import StepPlan
from tests.engines import Rig, engine_config, expect_balanced, fake_runner
from tests.fakes import FakeRunner, FakeTokenizer, continuation
from tests.loops import EVERY_LOOP

ANSWER_S = 5.0


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Runs a test over each kind of private loop."""
    return request.param


def new_rig(runner: FakeRunner | None = None) -> Rig:
    """Gives an engine with the real worker, not started."""
    config = engine_config()
    fake = fake_runner(config) if runner is None else runner
    return Rig(Engine(config, fake, FakeTokenizer()), fake)


def threads() -> list[str]:
    """Gives the names of the engine's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megallm")]


@pytest.fixture
def rig() -> Rig:
    """Gives an engine that has not started."""
    return new_rig()


@pytest.fixture
def host(rig: Rig, backend: Backend) -> Iterator[EngineHost]:
    """Gives a host of it; closed afterwards, with its threads gone."""
    started = EngineHost(rig.engine, backend)
    yield started
    started.close()
    assert threads() == []


def pending_calls(host: EngineHost, rig: Rig, num_calls: int = 4) -> list[Future[list[int]]]:
    """Starts calls that take long, and waits until they run."""
    running = threading.Event()
    rig.runner.before_launch = lambda _plan: running.set()
    futures = [host.submit(rig.tokens_of, [index], 120) for index in range(num_calls)]
    assert running.wait(ANSWER_S)
    return futures


def fail_from_now(rig: Rig, failure: Exception) -> None:
    """Makes the next forward pass raise."""

    def fail(_plan: StepPlan) -> None:
        raise failure

    rig.runner.before_launch = fail


def test_a_call_gives_its_answer(host: EngineHost, rig: Rig) -> None:
    """From a thread without a loop."""
    assert host.call(rig.tokens_of, [5], 8) == continuation([5], 8)
    assert host.is_alive
    expect_balanced(rig.engine.stats(), rig.engine.config.num_blocks)


def test_several_threads_batch_together(host: EngineHost, rig: Rig) -> None:
    """Each gets its own answers; upstream asks callers to take turns."""
    answers: dict[int, list[int]] = {}

    def call(index: int) -> None:
        for prompt in range(10 * index, 10 * index + 5):
            answers[prompt] = host.call(rig.tokens_of, [prompt], 20)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(answers) == 40
    assert answers == {prompt: continuation([prompt], 20) for prompt in answers}
    assert max(rig.rows_of_steps()) > 1


def test_a_coroutine_runs_in_the_engines_loop(host: EngineHost, rig: Rig) -> None:
    """`run_sync` and `submit` of the facades."""
    assert host.run_coroutine(rig.tokens_of([5], 3)) == continuation([5], 3)
    assert host.submit_coroutine(rig.tokens_of([6], 3)).result(ANSWER_S) == continuation([6], 3)


def test_a_call_from_the_loop_itself_is_refused(host: EngineHost, rig: Rig) -> None:
    """It would wait for itself for ever."""

    async def call_back() -> None:
        host.call(rig.tokens_of, [5], 3)

    with pytest.raises(RuntimeError, match="called from the engine's own loop"):
        host.submit(call_back).result(ANSWER_S)


def test_cancelling_the_future_frees_the_blocks(host: EngineHost, rig: Rig) -> None:
    """A hosted async call is cancelled this way."""
    for future in pending_calls(host, rig):
        assert future.cancel()
    assert host.call(rig.tokens_of, [5], 3) == continuation([5], 3)
    expect_balanced(rig.engine.stats(), rig.engine.config.num_blocks)


def test_a_start_that_fails_leaves_no_thread(backend: Backend) -> None:
    """And says what failed."""

    class NoRoom(FakeRunner):
        def start(self) -> None:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        EngineHost(new_rig(NoRoom()).engine, backend)
    assert threads() == []


def test_a_failing_engine_fails_all_calls_with_the_cause_within_a_second(host: EngineHost, rig: Rig) -> None:
    """Callers in any number of threads; and closing still returns."""
    failure = ArithmeticError("boom")
    futures = pending_calls(host, rig)
    fail_from_now(rig, failure)
    for future in futures:
        with pytest.raises(EngineDeadError) as dead:
            future.result(1.0)
        assert dead.value.__cause__ is failure
    with pytest.raises(EngineDeadError) as later:
        host.call(rig.tokens_of, [5], 3)
    assert later.value.__cause__ is failure
    with pytest.raises(EngineDeadError):
        host.wait_for_shutdown()
    host.close()
    with pytest.raises(EngineDeadError) as closed:
        host.call(rig.tokens_of, [5], 3)
    assert closed.value.__cause__ is failure


def test_closing_ends_pending_calls_and_refuses_later_ones(host: EngineHost, rig: Rig) -> None:
    """Idempotent; an error says whose choice it was."""
    futures = pending_calls(host, rig)
    host.close()
    for future in futures:
        with pytest.raises(EngineStoppedError, match="the engine was shut down"):
            future.result(0)
    with pytest.raises(EngineStoppedError):
        host.call(rig.tokens_of, [5], 3)
    host.close()
    assert not host.is_alive
    assert rig.runner.is_closed


def test_several_threads_may_close_at_once(backend: Backend) -> None:
    """A signal handler's thread and the main one."""
    for _ in range(10):
        host = EngineHost(new_rig().engine, backend)
        errors: list[BaseException] = []

        def close(host: EngineHost = host, errors: list[BaseException] = errors) -> None:
            try:
                host.close()
            except RuntimeError as error:
                errors.append(error)

        closers = [threading.Thread(target=close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(ANSWER_S)
            assert not closer.is_alive()
        assert errors == []
        assert not host.is_alive


def test_waiting_for_the_end_returns_when_somebody_ends_it(host: EngineHost) -> None:
    """A main thread that serves waits like this."""
    waiter = threading.Thread(target=host.wait_for_shutdown)
    waiter.start()
    host.close()
    waiter.join(ANSWER_S)
    assert not waiter.is_alive()
    host.wait_for_shutdown()


class Owner:
    """Whose end is the host's end."""


def test_a_forgotten_owner_closes_the_host_and_is_warned_of(rig: Rig, backend: Backend) -> None:
    """`del llm`: the memory comes back at once, not at exit."""
    host = EngineHost(rig.engine, backend)
    owner = Owner()
    host.close_with(owner)
    with pytest.warns(ResourceWarning, match=r"a Owner was dropped without shutdown\(\)"):
        del owner
    assert threads() == []
    assert rig.runner.is_closed


def test_a_forgotten_owner_closes_the_host_even_where_warnings_are_errors(rig: Rig, backend: Backend) -> None:
    """In a test suite they are, as in this one: the engine would go on for ever."""
    host = EngineHost(rig.engine, backend)
    owner = Owner()
    finalizer = host.close_with(owner)
    with pytest.raises(ResourceWarning):
        finalizer()
    assert threads() == []


def test_an_owner_collected_in_the_engines_loop_does_not_lock_it_up(rig: Rig, backend: Backend) -> None:
    """The collector runs in any thread, the loop's own among them."""
    host = EngineHost(rig.engine, backend)
    owner: Owner | None = Owner()
    gone = weakref.ref(owner)
    host.close_with(owner)
    holders = [owner]
    owner = None

    async def drop() -> None:
        with pytest.warns(ResourceWarning):
            holders.clear()
        await anyio.lowlevel.checkpoint()

    host.submit(drop).exception(ANSWER_S)
    assert gone() is None
    host.wait_for_shutdown()
    for thread in threading.enumerate():
        if thread.name.startswith("megallm"):
            thread.join(ANSWER_S)
    assert threads() == []


@pytest.mark.anyio
@EVERY_LOOP
async def test_a_call_from_a_loop_that_the_end_cuts_short_says_what_ended(rig: Rig, host: EngineHost) -> None:
    """A cancelled future would look like the caller's own cancel."""
    errors: list[str] = []

    async def call() -> None:
        with pytest.raises(EngineStoppedError) as stopped:
            await host.call_from_loop(anyio.sleep_forever)
        errors.append(str(stopped.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(host.close)
    assert errors == ["the engine was shut down"]
