"""How the async facade starts and ends, in the caller's loop and on a private one."""

import gc
import threading
import time

import anyio
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.plan.prompts import Prompts
from megallm.core_async.sampling_params import SamplingParams
from tests.small_llm import (
    Brake,
    brake,
    expected,
    greedy,
    hosted_llm,
    make_async_llm,
    native_llm,
    new_model,
    shared_model,
    threads_of_engines,
    untouched,
)
from tests.test_llm import WAYS, MakeLLM, happened, one, several

pytestmark = pytest.mark.anyio


@pytest.fixture(params=list(WAYS))
def running_llm(request: pytest.FixtureRequest) -> MakeLLM:
    """Gives each way to run the facade, over the small model."""
    return WAYS[request.param]


# ---- the block ---------------------------------------------------------------------------------


async def end_of_generate(llm: MegatronAsyncLLM, ended: list[BaseException]) -> None:
    """Makes a call that the engine's shutdown ends, and writes down how."""
    with pytest.raises(EngineStoppedError) as stopped:
        await llm.generate([[5] * 20], greedy(None))
    ended.append(stopped.value)


async def raise_in_block(params: SamplingParams) -> None:
    """Makes a call in a block, and fails."""
    async with make_async_llm() as llm:
        await llm.generate("A", params)
        raise KeyError("mine")


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    """No exception group, nothing swallowed; and everything is shut down by then."""
    with untouched(shared_model()):
        with pytest.raises(KeyError, match="mine"):
            await raise_in_block(greedy(1))
        assert threads_of_engines() == []


async def test_an_error_in_a_block_with_calls_under_way_comes_out_as_it_is() -> None:
    """The calls of other tasks end, in their own tasks, with an error that says why."""
    ended: list[BaseException] = []

    async def run_block(tasks: TaskGroup, braked: Brake) -> None:
        async with make_async_llm() as llm:
            braked.on_forward = is_running.set
            tasks.start_soon(end_of_generate, llm, ended)
            await happened(is_running)
            raise KeyError("mine")

    is_running = threading.Event()
    with brake() as braked, untouched(shared_model()):
        async with anyio.create_task_group() as tasks:
            with pytest.raises(KeyError, match="mine"):
                await run_block(tasks, braked)
        assert [type(error) for error in ended] == [EngineStoppedError]


async def test_a_cancelled_block_is_left_in_order() -> None:
    """The model comes back before the caller's scope ends, cancelled or not."""
    is_running = threading.Event()
    with brake() as braked, untouched(shared_model()):
        braked.on_forward = is_running.set
        with anyio.CancelScope() as scope:
            async with make_async_llm() as llm, anyio.create_task_group() as tasks:
                tasks.start_soon(llm.generate, [[5] * 20], greedy(None))
                await happened(is_running)
                scope.cancel()
        assert scope.cancelled_caught
        assert threads_of_engines() == []


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    """At any await of it."""
    for num_checkpoints in range(12):
        with untouched(shared_model()), anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel(count: int = num_checkpoints, scope: anyio.CancelScope = scope) -> None:
                    for _ in range(count):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                tasks.start_soon(cancel)
                async with make_async_llm():
                    await anyio.sleep_forever()


async def test_a_start_that_fails_raises_what_failed() -> None:
    """As it is, in both ways; and closing what never started returns."""

    def refuse(*_args: object, **_options: object) -> None:
        raise MemoryError("no room")

    model = new_model()
    model.output_layer.register_forward_pre_hook = refuse
    with untouched(model):
        with pytest.raises(MemoryError, match="no room"):
            async with make_async_llm(model=model):
                pytest.fail("it started")
        hosted = make_async_llm(model=model)
        with pytest.raises(MemoryError, match="no room"):
            await hosted.generate("A", greedy(1))
        await hosted.shutdown()


async def test_it_is_entered_once() -> None:
    """Twice would bind the model twice."""
    async with native_llm() as llm:
        with pytest.raises(RuntimeError, match="runs already"):
            async with llm:
                pytest.fail("it was entered twice")
        assert (await one(llm, "A", greedy(2))).generated_tokens == expected("A", 2)
    with pytest.raises(RuntimeError, match="enter it once"):
        async with llm:
            pytest.fail("it was entered after its end")


async def test_a_hosted_one_is_not_entered() -> None:
    """Its engine lives in another loop already."""
    async with hosted_llm() as llm:
        await llm.generate("A", greedy(1))
        with pytest.raises(RuntimeError, match="runs already"):
            async with llm:
                pytest.fail("it was entered")
        assert (await one(llm, "A", greedy(2))).generated_tokens == expected("A", 2)


async def test_two_engines_nest() -> None:
    """A policy and its reference model, side by side in one program."""
    async with native_llm() as llm, make_async_llm(model=new_model()) as other:
        first, second = await several(llm, ["A", "B"], greedy(5)), await several(other, ["A", "B"], greedy(5))
        assert [result.generated_tokens for result in first] == [expected("A", 5), expected("B", 5)]
        assert [result.generated_tokens for result in second] == [expected("A", 5), expected("B", 5)]


# ---- afterwards --------------------------------------------------------------------------------


async def test_after_its_end_every_call_says_so(running_llm: MakeLLM) -> None:
    """Whichever way it ran, and also for calls that have nothing to run."""
    async with running_llm() as llm:
        await llm.generate("A", greedy(1))
        await llm.shutdown()
        await llm.shutdown()
        calls: list[Prompts] = ["A", ["A"], []]
        for prompts in calls:
            with pytest.raises(EngineStoppedError, match="the engine was shut down"):
                await llm.generate(prompts, greedy(1))
        with pytest.raises(EngineStoppedError):
            await anext(llm.stream("A", greedy(1)))
        await llm.wait_for_shutdown()


async def test_shutdown_ends_the_calls_of_other_tasks(running_llm: MakeLLM) -> None:
    """Each with the error that says so."""
    ended: list[BaseException] = []

    async def read(llm: MegatronAsyncLLM) -> None:
        with pytest.raises(EngineStoppedError) as stopped:
            [delta async for delta in llm.stream([6] * 20, greedy(None))]
        ended.append(stopped.value)

    with brake() as braked:
        async with running_llm() as llm, anyio.create_task_group() as tasks:
            braked.hold(after=1)
            for _ in range(3):
                tasks.start_soon(end_of_generate, llm, ended)
            tasks.start_soon(read, llm)
            await happened(braked.is_holding)
            threading.Thread(target=braked.release).start()
            await llm.shutdown()
        assert len(ended) == 4


async def test_one_that_was_never_started_needs_no_closing() -> None:
    """Nothing was begun, so nothing is warned of."""
    with untouched(shared_model()):
        llm = make_async_llm()
        await llm.shutdown()
        del llm
        gc.collect()


async def test_a_closed_hosted_one_is_dropped_without_a_word() -> None:
    """Warnings are errors here."""
    with untouched(shared_model()):
        llm = make_async_llm()
        await llm.generate("A", greedy(1))
        await llm.shutdown()
        del llm
        gc.collect()


async def test_dropping_a_hosted_one_stops_it_and_says_so() -> None:
    """Threads, memory and the model come back at once."""
    with untouched(shared_model()):
        llm = make_async_llm()
        await llm.generate("A", greedy(1))
        assert threads_of_engines()
        with pytest.warns(ResourceWarning, match=r"a MegatronAsyncLLM was dropped without shutdown\(\)"):
            del llm
        assert threads_of_engines() == []


# ---- the engine's loop -------------------------------------------------------------------------


async def double(value: int) -> int:
    """Gives twice the value, after a turn of the loop."""
    await anyio.lowlevel.checkpoint()
    return 2 * value


async def test_coroutines_run_in_the_engines_loop(running_llm: MakeLLM) -> None:
    """`submit` and `run_sync` as upstream, from other threads."""
    async with running_llm() as llm:
        future = await anyio.to_thread.run_sync(lambda: llm.submit(double(4)))
        assert await anyio.to_thread.run_sync(future.result, 5.0) == 8
        assert await anyio.to_thread.run_sync(lambda: llm.run_sync(double(5))) == 10


async def test_a_coroutine_under_way_at_the_end_is_cancelled_with_the_reason(running_llm: MakeLLM) -> None:
    """A thread in `run_sync` must not wait for a loop that is gone, nor get a bare CancelledError."""
    began = threading.Event()
    ended: list[BaseException] = []

    async def wait_for_ever() -> None:
        began.set()
        await anyio.sleep_forever()

    def run() -> None:
        with pytest.raises(EngineStoppedError) as stopped:
            llm.run_sync(wait_for_ever())
        ended.append(stopped.value)

    async with running_llm() as llm:
        await llm.generate("A", greedy(1))
        waiter = threading.Thread(target=run)
        waiter.start()
        await happened(began)
        await llm.shutdown()
    await anyio.to_thread.run_sync(waiter.join, 5.0)
    assert len(ended) == 1


async def test_run_sync_in_the_engines_own_loop_is_refused() -> None:
    """It would wait for itself."""
    async with native_llm() as llm:
        with pytest.raises(RuntimeError, match="own loop"):
            llm.run_sync(double(4))


async def test_coroutines_that_come_too_late_are_refused_and_closed(running_llm: MakeLLM) -> None:
    """With the engine's error; and none is left that was never awaited."""
    async with running_llm() as llm:
        await llm.generate("A", greedy(1))
        await llm.shutdown()
    for call in (llm.submit, llm.run_sync):
        with pytest.raises(EngineStoppedError):
            await anyio.to_thread.run_sync(call, double(4))
    gc.collect()


async def test_direct_mode_has_no_loop_to_lend_and_no_lifecycle() -> None:
    """As upstream; and the coroutine that was not run is closed."""
    async with native_llm(use_coordinator=False) as llm:
        for lend in (llm.submit, llm.run_sync):
            with pytest.raises(RuntimeError, match="requires use_coordinator=True"):
                lend(double(4))
        for call in (llm.pause, llm.unpause, llm.suspend, llm.resume):
            with pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) requires use_coordinator=True"):
                await call()
        await llm.wait_for_shutdown()
    gc.collect()


# ---- failed ------------------------------------------------------------------------------------


async def error_of(llm: MegatronAsyncLLM, prompts: Prompts) -> EngineDeadError:
    """Gives what a call on a dead engine raises."""
    with pytest.raises(EngineDeadError) as dead:
        await llm.generate(prompts, greedy(1))
    return dead.value


async def test_a_layer_that_raises_fails_every_call_with_the_cause(running_llm: MakeLLM) -> None:
    """Tasks and streams learn of it in a second; leaving the block still works, and gives the model back."""
    failure = RuntimeError("out of memory")
    errors: list[EngineDeadError] = []

    async def generate(llm: MegatronAsyncLLM, index: int) -> None:
        with pytest.raises(EngineDeadError) as dead:
            await llm.generate([[index], [index, index]], greedy(100))
        errors.append(dead.value)

    async def read(llm: MegatronAsyncLLM) -> None:
        with pytest.raises(EngineDeadError) as dead:
            [delta async for delta in llm.stream([5], greedy(100))]
        errors.append(dead.value)

    raised_at: list[float] = []
    with brake() as braked:

        def fail_soon() -> None:
            if braked.num_forwards > 5:
                braked.failure = failure
                raised_at.append(time.monotonic())

        braked.on_forward = fail_soon
        async with running_llm() as llm:
            async with anyio.create_task_group() as tasks:
                for index in range(4):
                    tasks.start_soon(generate, llm, index)
                tasks.start_soon(read, llm)
            assert time.monotonic() - raised_at[0] < 1.0
            assert len(errors) == 5
            assert {error.__cause__ for error in errors} == {failure}
            later = [await error_of(llm, "A"), await error_of(llm, [])]
            assert [error.__cause__ for error in later] == [failure] * 2
            with pytest.raises(EngineDeadError):
                await llm.wait_for_shutdown()
