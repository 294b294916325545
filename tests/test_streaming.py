"""Streams of deltas: together they are the whole output, and leaving one early frees its blocks."""

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from megallm.core_async.errors import EngineDeadError, EngineStoppedError, InvalidRequestError
from megallm.core_async.intake import Intake
from megallm.core_async.messages import Delta, Finished, RequestId, StepPlan
from megallm.core_async.streaming import AsyncStream, StreamState, joined
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.engines import Rig, running
from tests.fakes import FakeTokenizer, continuation
from tests.small_llm import greedy

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def run_here[*A, T](function: Callable[[*A], Awaitable[T]], *args: *A) -> T:
    """Runs a function in the engine's loop, which is the caller's too."""
    return await function(*args)


def stream_of(rig: Rig, prompt: object = PROMPT, **fields: Any) -> AsyncStream:  # Any: parameters
    """Gives a stream of a greedy request."""
    intake = Intake(rig.engine.config, TokenizerAdapter(FakeTokenizer()), rig.engine.next_request_id)
    call = intake.prepare(prompt, greedy(**{"num_tokens": 12, **fields}), is_streamed=True)
    return AsyncStream(StreamState(rig.engine, call), run_here)


async def read(stream: AsyncStream) -> list[Delta]:
    """Gives all that is left of a stream."""
    return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    """Gives the text of deltas in a row."""
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    """Gives the tokens of deltas in a row."""
    return [token for delta in deltas for token in delta.token_ids]


# ---- reading -----------------------------------------------------------------------------------


async def test_deltas_together_are_the_whole_output() -> None:
    """Nothing twice, nothing missing; only the last says why it ended."""
    async with running() as rig:
        deltas = await read(stream_of(rig))
        assert tokens_of(deltas) == continuation(PROMPT, 12)
        assert text_of(deltas) == FakeTokenizer().detokenize(continuation(PROMPT, 12))
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert len(deltas) > 6, "a quick reader gets them as they come"


async def test_a_stop_word_is_held_back_and_never_shown() -> None:
    """Its beginning, once shown, could not be taken back."""
    async with running() as rig:
        tokens = continuation(PROMPT, 40)
        word = FakeTokenizer().detokenize(tokens[20:24])
        deltas = await read(stream_of(rig, num_tokens=100, stop_words=[word]))
        assert text_of(deltas) == FakeTokenizer().detokenize(tokens[:20])
        assert tokens_of(deltas) == tokens[:20]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", word)


async def test_a_slow_reader_gets_what_piled_up_as_one() -> None:
    """The engine never waits for a reader, and the reader catches up in one step."""
    async with running() as rig:
        stream = stream_of(rig)
        first = await anext(stream)
        await anyio.wait_all_tasks_blocked()
        rest = await read(stream)
        assert len(rest) == 1
        assert tokens_of([first, *rest]) == continuation(PROMPT, 12)
        assert rest[0].finish_reason == "length"


async def test_after_the_last_delta_it_is_over() -> None:
    """Also for whoever asks again."""
    async with running() as rig:
        stream = stream_of(rig)
        await read(stream)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await stream.aclose()


async def test_nothing_runs_before_the_first_read() -> None:
    """A stream that is made and not used costs nothing."""
    async with running() as rig:
        stream = stream_of(rig)
        await anyio.wait_all_tasks_blocked()
        assert rig.runner.plans == []
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert rig.runner.plans == []


async def test_a_prompt_that_can_not_run_raises_at_the_call() -> None:
    """There is no result that could carry it."""
    async with running() as rig:
        with pytest.raises(InvalidRequestError, match="prompt has 200 tokens"):
            stream_of(rig, [1] * 200)


async def test_nothing_to_generate_is_one_empty_delta() -> None:
    """A reader that waits for the finish reason gets one."""
    async with running() as rig:
        assert await read(stream_of(rig, [1] * 128)) == [Delta("", [], finish_reason="length")]
        assert rig.runner.plans == []


# ---- leaving -----------------------------------------------------------------------------------


async def leave_by_break(stream: AsyncStream) -> None:
    """Breaks out of the loop, and closes as one should."""
    async for _ in stream:
        break
    await stream.aclose()


async def leave_by_block(stream: AsyncStream) -> None:
    """Leaves an `async with` block."""
    async with stream:
        await anext(stream)


async def leave_by_timeout(stream: AsyncStream) -> None:
    """Is cancelled while it waits for a delta."""
    await anext(stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, stream)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def leave_by_cancelled_start(stream: AsyncStream) -> None:
    """Is cancelled before the first delta."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(stream)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_block, leave_by_timeout, leave_by_cancelled_start]
)
async def test_leaving_it_aborts_its_request(leave: Callable[[AsyncStream], Awaitable[None]]) -> None:
    """However it is left; the neighbours go on."""
    async with running() as rig:
        neighbour = stream_of(rig, [9])
        first = await anext(neighbour)
        stream = stream_of(rig, [8] * 40, num_tokens=None)
        await leave(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert tokens_of([first, *await read(neighbour)]) == continuation([9], 12)
        assert len(rig.runner.plans) < 40, "88 tokens were left to generate"


async def test_a_stream_that_is_dropped_aborts_its_request() -> None:
    """A consumer that forgets `aclose` must not cost the others their blocks."""
    async with running() as rig:
        stream = stream_of(rig, [8] * 40, num_tokens=None)
        await anext(stream)
        del stream
        gc.collect()
        await rig.expect_all_free()
        assert len(rig.runner.plans) < 40


async def test_a_stream_cancelled_anywhere_leaves_nothing_behind() -> None:
    """Before, while and after the submission is answered."""
    async with running() as rig:
        for num_checkpoints in range(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, stream_of(rig, [8] * 40, num_tokens=None))
                for _ in range(num_checkpoints):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await rig.expect_all_free()


async def test_closing_a_stream_that_another_task_reads_ends_the_reading() -> None:
    """How a server ends a stream whose client has gone: at any moment, and the reader is not left waiting."""
    async with running() as rig:
        for num_checkpoints in range(12):
            ended: list[list[Delta]] = []

            async def read_all(stream: AsyncStream, ended: list[list[Delta]] = ended) -> None:
                ended.append(await read(stream))

            stream = stream_of(rig, [8] * 40, num_tokens=None)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_all, stream)
                for _ in range(num_checkpoints):
                    await anyio.lowlevel.checkpoint()
                await stream.aclose()
            tokens = tokens_of(ended[0])
            assert tokens == continuation([8] * 40, len(tokens))
            assert len(tokens) < 40
            await rig.expect_all_free()


# ---- the engine's end --------------------------------------------------------------------------


async def test_a_failing_engine_ends_a_stream_with_the_cause() -> None:
    """After what had come before it."""
    failure = ArithmeticError("boom")

    def fail(plan: StepPlan) -> None:
        if plan.step == 6:
            raise failure

    async with running() as rig:
        rig.runner.before_launch = fail
        stream = stream_of(rig, num_tokens=100)
        await anyio.wait_all_tasks_blocked()
        first = await anext(stream)
        await anyio.wait_all_tasks_blocked()
        before = tokens_of([first, await anext(stream)])
        assert before == continuation(PROMPT, len(before))
        assert len(before) < 6
        with pytest.raises(EngineDeadError) as dead:
            await anext(stream)
        assert dead.value.__cause__ is failure


async def test_shutdown_ends_a_stream() -> None:
    """And a stream that starts later."""
    async with running() as rig:
        stream = stream_of(rig, num_tokens=100)
        await anext(stream)
        await rig.engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await read(stream)
        with pytest.raises(EngineStoppedError):
            await anext(stream_of(rig))
        with pytest.raises(EngineStoppedError):
            await anext(stream_of(rig, [1] * 128))


# ---- joining -----------------------------------------------------------------------------------


def test_joined_deltas_keep_everything_in_order() -> None:
    """Log-probs are there for each token, or not at all."""
    first = Delta("a", [1], [-0.1], [{"a": -0.1}])
    last = Delta("b", [2, 3], [-0.2, -0.3], [{"b": -0.2}, {"c": -0.3}], "stop", 3)
    assert joined(first, last) == Delta(
        "ab", [1, 2, 3], [-0.1, -0.2, -0.3], [{"a": -0.1}, {"b": -0.2}, {"c": -0.3}], "stop", 3
    )
    assert joined(Delta("a", [1]), Delta("b", [2])) == Delta("ab", [1, 2])
    assert joined(Delta("a", [1], [-0.1]), Delta("", [], finish_reason="length")).log_probs == [-0.1]
    ending = Finished(RequestId(7), "length")
    scored = Delta("a", [1], top=[[(1, -0.1)]], prompt_log_probs=[-1.0], prompt_top=[[(2, -0.5)]])
    whole = joined(scored, Delta("b", [2], top=[[(3, -0.2)]], request_id=RequestId(7), ending=ending))
    assert (whole.top, whole.request_id, whole.ending) == ([[(1, -0.1)], [(3, -0.2)]], 7, ending)
    assert (whole.prompt_log_probs, whole.prompt_top) == ([-1.0], [[(2, -0.5)]])
