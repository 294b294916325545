"""The async facade, native in the caller's loop and hosted on a private one: the same answers either way."""

import asyncio
import copy
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
import torch
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megallm.core_async.engine import DEPTH
from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.facade import Params
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.messages import Delta, EngineStats
from megallm.core_async.plan.prompts import Prompts
from megallm.core_async.result import Result
from megallm.core_async.streaming import AsyncStream
from tests.fakes import FakeTokenizer
from tests.small_llm import brake, expected, greedy, hosted_llm, native_llm, settings, tokens_of

pytestmark = pytest.mark.anyio

type MakeLLM = Callable[..., AbstractAsyncContextManager[MegatronAsyncLLM]]

WAYS: dict[str, MakeLLM] = {
    "native": native_llm,
    "hosted on asyncio": functools.partial(hosted_llm, loop="asyncio"),
    "hosted on trio": functools.partial(hosted_llm, loop="trio"),
}
PROMPTS = ["A", "Hello", "x" * 40, "The quick brown fox", "0123456789"]


async def happened(event: threading.Event) -> None:
    """Waits for an event of another thread."""
    assert await anyio.to_thread.run_sync(event.wait, 5.0)


@pytest.fixture(params=list(WAYS))
def running_llm(request: pytest.FixtureRequest) -> MakeLLM:
    """Gives each way to run the facade, over the small model."""
    return WAYS[request.param]


async def one(
    llm: MegatronAsyncLLM, prompt: str | list[int], params: Any = None
) -> Result:  # Any: parameters
    """Gives the result of one prompt, which comes alone."""
    result = await llm.generate(prompt, params)
    assert isinstance(result, Result)
    return result


async def several(llm: MegatronAsyncLLM, prompts: Prompts, params: Params = None) -> list[Result]:
    """Gives the results of a batch, which come as a list."""
    results = await llm.generate(prompts, params)
    assert isinstance(results, list)
    return results


# ---- prompts -----------------------------------------------------------------------------------


async def test_a_batch_gives_a_list_and_one_prompt_a_result(running_llm: MakeLLM) -> None:
    """The answers are those of whole forward passes through the unmodified model."""
    ids = FakeTokenizer().tokenize("Hello")
    async with running_llm() as llm:
        assert tokens_of(await several(llm, PROMPTS, greedy(12))) == [expected(each, 12) for each in PROMPTS]
        assert (await one(llm, "Hello", greedy(5))).generated_tokens == expected("Hello", 5)
        assert (await one(llm, ids, greedy(5))).generated_tokens == expected("Hello", 5)
        assert tokens_of(await several(llm, ["Hello"], greedy(5))) == [expected("Hello", 5)]
        assert tokens_of(await several(llm, [ids, [3]], greedy(5))) == [expected(ids, 5), expected([3], 5)]
        assert await llm.generate([]) == []


async def test_mistakes_raise_before_anything_runs(running_llm: MakeLLM) -> None:
    """Types by name and place, values by field and range."""
    calls: list[tuple[Any, Any, str]] = [
        (("a",), greedy(), "prompts is a tuple"),
        (["a", 1], greedy(), r"prompts\[1\] is a int"),
        ("a", 5, "sampling_params is a int"),
        ("a", [greedy(), greedy()], "2 sampling_params came for 1 prompts"),
        (["a", "b"], [greedy(), greedy(top_p=1.5)], "top_p is 1.5; it must be from 0 to 1"),
        (torch.tensor([1]), greedy(), "prompts is a Tensor"),
    ]
    async with running_llm() as llm:
        for prompts, params, message in calls:
            with pytest.raises((TypeError, ValueError), match=message):
                await llm.generate(prompts, params)
        with pytest.raises(ValueError, match="the model has no vision part"):
            await llm.generate("a", greedy(), {"image": b""})
        assert llm.engine.stats().step == 0


async def test_a_bad_prompt_is_a_failed_result_and_its_neighbours_run(running_llm: MakeLLM) -> None:
    """Alone as well."""
    async with running_llm() as llm:
        results = await several(llm, [[1], [], [2] * 129, [96], [3]], greedy(4))
        assert [result.failed() for result in results] == [False, True, True, True, False]
        assert tokens_of(results) == [expected([1], 4), [], [], [], expected([3], 4)]
        alone = await one(llm, "", greedy(4))
        assert (alone.status, alone.finish_reason) == (Status.FAILED, "error")
        payload: Any = alone.events[0].payload
        assert isinstance(payload, InvalidRequestError)


async def test_budgets_are_clamped_and_parameters_left_alone(running_llm: MakeLLM) -> None:
    """One for each prompt, megatron's own among them."""
    each = [greedy(1_000_000), MegatronSamplingParams(top_k=1, num_tokens_to_generate=3, termination_id=-1)]
    before = copy.deepcopy(each)
    async with running_llm() as llm:
        results = await several(llm, [[5] * 120, [7, 8]], each)
        assert tokens_of(results) == [expected([5] * 120, 8), expected([7, 8], 3)]
        assert each == before


async def test_long_calls_are_tokenised_off_the_loop() -> None:
    """A call of megabytes would stall every stream of the program."""
    seen: list[int] = []

    class Watched(FakeTokenizer):
        def tokenize(self, text: str) -> list[int]:
            seen.append(threading.get_ident())
            return super().tokenize(text)

    async with native_llm(tokenizer=Watched()) as llm:
        await llm.generate(["A", "B"], greedy(1))
        assert seen == [threading.get_ident()] * 2, "short ones are done on the spot"
        seen.clear()
        results = await several(llm, ["A" * 12_000, "B" * 12_000], greedy(1))
        assert all(result.failed() for result in results), "too long for the context"
        assert threading.get_ident() not in seen


# ---- many callers ------------------------------------------------------------------------------


async def test_many_tasks_batch_together(running_llm: MakeLLM) -> None:
    """Each gets its own answers."""
    answers: dict[int, list[list[int]]] = {}

    async def call(index: int) -> None:
        prompts = [[index, place] for place in range(3)]
        answers[index] = tokens_of(await several(llm, prompts, greedy(8)))

    async with running_llm() as llm:
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(call, index)
        assert answers == {index: [expected([index, place], 8) for place in range(3)] for index in range(8)}
        assert llm.engine.stats().step < 8 * 8


type Call = Callable[[], Coroutine[Any, Any, object]]  # Any: what a coroutine yields to its loop


async def cancel_by_scope(call: Call, is_running: threading.Event) -> None:
    """Cancels a call by the scope that it runs in."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await happened(is_running)
        tasks.cancel_scope.cancel()


async def cancel_by_sibling(call: Call, is_running: threading.Event) -> None:
    """Cancels a call by the failure of a sibling in its task group."""

    class SiblingError(Exception):
        pass

    async def run_both() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await happened(is_running)
            raise SiblingError

    with pytest.raises(ExceptionGroup) as failed:
        await run_both()
    assert failed.group_contains(SiblingError)


async def cancel_by_deadline(call: Call, is_running: threading.Event) -> None:
    """Cancels a call by a deadline that passes while it runs."""
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def expire() -> None:
            await happened(is_running)
            scope.deadline = anyio.current_time()

        tasks.start_soon(expire)
        with scope:
            await call()
        assert scope.cancelled_caught


@pytest.mark.parametrize("cancel", [cancel_by_scope, cancel_by_sibling, cancel_by_deadline])
async def test_a_cancelled_call_frees_its_blocks_and_leaves_its_neighbours(
    running_llm: MakeLLM, cancel: Callable[[Call, threading.Event], Awaitable[None]]
) -> None:
    """Upstream cancels the future alone, and generates on."""
    all_run, is_cancelled = threading.Event(), threading.Event()
    after: list[EngineStats] = []

    with brake() as braked:
        async with running_llm(config=settings(num_blocks=96)) as llm:

            def look() -> None:
                if is_cancelled.is_set():
                    after.append(llm.engine.stats())
                elif llm.engine.stats().running == 3:
                    all_run.set()

            braked.on_forward = look
            neighbour: list[Result] = []

            async def stay() -> None:
                neighbour.append(await one(llm, "Hello", greedy(100)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stay)
                await cancel(lambda: several(llm, [[5] * 40, [6] * 40], greedy(None)), all_run)
                is_cancelled.set()
            assert neighbour[0].generated_tokens == expected("Hello", 100)
    later = after[DEPTH:]
    assert later, "the neighbour ended too early to see anything"
    assert {stats.running for stats in later} <= {0, 1}
    assert max(stats.used_blocks for stats in later) <= 27, "those of the neighbour's 105 tokens"


def test_asyncios_own_cancel_is_a_cancel_too() -> None:
    """`Task.cancel` and `asyncio.timeout` know nothing of scopes."""

    async def main() -> None:
        async with native_llm() as llm:
            braked.on_forward = lambda: is_running.set() if llm.engine.stats().running == 2 else None
            call = asyncio.create_task(several(llm, [[5] * 40, [6] * 40], greedy(None)))
            await happened(is_running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await one(llm, "A", greedy(3))).generated_tokens == expected("A", 3)

    is_running = threading.Event()
    with brake() as braked:
        asyncio.run(main())


# ---- streams -----------------------------------------------------------------------------------


def ids_of(deltas: list[Delta]) -> list[int]:
    """Gives the tokens of deltas in a row."""
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_stream_gives_what_generate_gives(running_llm: MakeLLM) -> None:
    """Joined, to the character; the reason at the end."""
    async with running_llm() as llm:
        whole = await one(llm, "Hello", greedy(30))
        deltas = [delta async for delta in llm.stream("Hello", greedy(30))]
        assert "".join(delta.text for delta in deltas) == whole.generated_text
        assert ids_of(deltas) == whole.generated_tokens == expected("Hello", 30)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_a_slow_reader_gets_fewer_and_larger_deltas(running_llm: MakeLLM) -> None:
    """And stalls nobody."""
    async with running_llm() as llm:
        stream = llm.stream("Hello", greedy(30))
        first = await anext(stream)
        await llm.generate("Hello", greedy(32))  # longer, begun later, and waited for
        rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert ids_of([first, *rest]) == expected("Hello", 30)


async def consume_by_break(stream: AsyncStream) -> None:
    """Breaks out, and closes."""
    async for _ in stream:
        break
    await stream.aclose()


async def consume_by_del(stream: AsyncStream) -> None:
    """Forgets it after the first delta."""
    await anext(stream)


async def consume_by_cancel(stream: AsyncStream) -> None:
    """Is cancelled while it reads."""
    async with anyio.create_task_group() as tasks:
        await anext(stream)

        async def read() -> None:
            async for _ in stream:
                tasks.cancel_scope.cancel()

        tasks.start_soon(read)


@pytest.mark.parametrize("consume", [consume_by_break, consume_by_del, consume_by_cancel])
async def test_leaving_a_stream_frees_its_request(
    running_llm: MakeLLM, consume: Callable[..., Awaitable[None]]
) -> None:
    """The fixture holds the books; and the abandoned request takes no more steps."""
    with brake() as braked:
        async with running_llm() as llm:
            await consume(llm.stream([5] * 20, greedy(None)))
            assert (await one(llm, [6], greedy(4))).generated_tokens == expected([6], 4)
            assert braked.num_forwards < 60, "108 tokens were left to generate"


async def test_a_stream_that_can_not_run_raises_at_the_call(running_llm: MakeLLM) -> None:
    """Where the mistake is."""
    async with running_llm() as llm:
        with pytest.raises(InvalidRequestError, match="129 tokens"):
            llm.stream([1] * 129)
        with pytest.raises(TypeError, match="prompt is a list of 2 prompts"):
            llm.stream(["A", "B"])  # pyright: ignore[reportArgumentType] - the mistake is the test
        assert llm.engine.stats().step == 0
