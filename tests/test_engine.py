"""The engine round a fake model: every request gets its own answer, whatever runs beside it."""

import threading

import anyio
import pytest

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineBusy, EngineStoppedError
from megallm.core_async.messages import Completion, Delta, Progress
from tests.engines import Rig, engine_config, fake_runner, running
from tests.fakes import FakeTokenizer, continuation

pytestmark = pytest.mark.anyio

PROMPTS = [[(7 * place + index) % 90 for place in range(1 + 3 * index)] for index in range(12)]
"""1 to 34 tokens."""


async def expect_answers(rig: Rig, num_tokens: int = 12) -> None:
    """Runs all prompts at once and fails unless each gets its own continuation."""
    completions = await rig.complete(*[rig.request(prompt, num_tokens) for prompt in PROMPTS])
    assert [completion.token_ids for completion in completions] == [
        continuation(prompt, num_tokens) for prompt in PROMPTS
    ]
    assert {completion.finish_reason for completion in completions} == {"length"}


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_threaded", [False, True], ids=["task", "thread"])
@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as a CPU", "as a GPU"])
async def test_a_batch_gets_the_models_answers_and_runs_as_one(
    is_threaded: bool,  # noqa: FBT001 - pytest passes it by name
    runs_at_launch: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Rows that mix up blocks, positions or last tokens give other tokens."""
    async with running(
        engine_config(num_blocks=128), is_threaded=is_threaded, runs_at_launch=runs_at_launch
    ) as rig:
        await expect_answers(rig)
        assert max(rig.rows_of_steps()) == len(PROMPTS)
        assert len(rig.runner.plans) == 12, "a step a token, and none for nothing"


async def test_requests_that_come_at_any_time_join_the_batch() -> None:
    """Continuous batching: nobody waits for a batch to end."""
    async with running() as rig:
        seen: dict[int, list[int]] = {}

        async def run_one(index: int) -> None:
            for _ in range(index):
                await anyio.lowlevel.checkpoint()
            seen[index] = await rig.tokens_of(PROMPTS[index], 20)

        async with anyio.create_task_group() as tasks:
            for index in range(len(PROMPTS)):
                tasks.start_soon(run_one, index)
        assert seen == {index: continuation(prompt, 20) for index, prompt in enumerate(PROMPTS)}
        assert max(rig.rows_of_steps()) > 1


async def test_a_pool_too_small_for_all_preempts_and_changes_no_answer() -> None:
    """Requests that lose their blocks compute their tokens again, and go on where they were."""
    async with running(engine_config(num_blocks=14, max_sequence_length=56)) as rig:
        await expect_answers(rig)
        assert rig.engine.stats().preemptions > 0


async def test_prompts_split_over_steps_change_no_answer() -> None:
    """A step of 16 tokens holds none of the longer prompts."""
    async with running(engine_config(max_tokens=16, chunks_prompts=True)) as rig:
        await expect_answers(rig)
        assert max(sum(plan.samples) for plan in rig.runner.plans) > 1
        tokens = [len(plan.tokens) // 4 + plan.num_decode for plan in rig.runner.plans]
        assert max(tokens) == 16


async def test_prompts_that_wait_for_room_change_no_answer() -> None:
    """Without chunking a prompt waits for a step that holds it whole; with few rows for a row."""
    async with running(engine_config(max_tokens=40, max_requests=3)) as rig:
        await expect_answers(rig)
        assert max(rig.rows_of_steps()) == 3


@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as a CPU", "as a GPU"])
async def test_blocks_chunks_and_rows_all_short_change_no_answer(runs_at_launch: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """The three meet in production, under load."""
    config = engine_config(
        num_blocks=14, max_sequence_length=56, max_tokens=8, max_requests=5, chunks_prompts=True
    )
    async with running(config, runs_at_launch=runs_at_launch) as rig:
        await expect_answers(rig)
        assert rig.engine.stats().preemptions > 0


async def test_a_stop_id_ends_its_request_alone_and_is_kept() -> None:
    """The id is the last generated token, and no part of the text."""
    async with running() as rig:
        prompt = PROMPTS[3]
        stop = continuation(prompt, 5)[-1]
        stopped, other = await rig.complete(
            rig.request(prompt, 30, stop_ids=(stop,)), rig.request(PROMPTS[4], 30)
        )
        expected = continuation(prompt, 30, stop_ids=(stop,))
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (expected, "stop", stop)
        assert stopped.text == FakeTokenizer().detokenize(expected[:-1])
        assert other.token_ids == continuation(PROMPTS[4], 30)


async def test_a_stop_word_ends_its_request_alone() -> None:
    """It is found in the text, across tokens, and the request's blocks are free at once."""
    async with running() as rig:
        tokens = continuation(PROMPTS[3], 30)
        word = FakeTokenizer().detokenize(tokens[10:13])
        stopped, other = await rig.complete(
            rig.request(PROMPTS[3], 100, stop_words=(word,)), rig.request(PROMPTS[4], 30)
        )
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (tokens[:10], "stop", word)
        assert stopped.text == FakeTokenizer().detokenize(tokens[:10])
        assert other.token_ids == continuation(PROMPTS[4], 30)


async def test_progress_counts_every_token() -> None:
    """The bar's tokens per second are made of it."""
    async with running() as rig:
        requests = [rig.request(prompt, 9, reports_progress=True) for prompt in PROMPTS[:3]]
        outbox = await rig.engine.submit(requests)
        parcels: list[Completion | Delta | Progress] = []
        while sum(isinstance(parcel, Completion) for parcel in parcels) < 3:
            parcels += await outbox.take()
        assert sum(parcel.num_tokens for parcel in parcels if isinstance(parcel, Progress)) == 27


# ---- admission ---------------------------------------------------------------------------------


async def test_a_full_waiting_list_refuses_a_batch_whole() -> None:
    """Backpressure is an error at the door; half a batch taken would have to be given back."""
    async with running(engine_config(max_waiting=4)) as rig:
        with pytest.raises(EngineBusy, match="6 requests came and 4 more may wait, of 4"):
            await rig.engine.submit([rig.request(prompt) for prompt in PROMPTS[:6]])
        assert rig.runner.plans == []
        completions = await rig.complete(*[rig.request(prompt) for prompt in PROMPTS[:4]])
        assert completions[3].token_ids == continuation(PROMPTS[3], 8)


async def test_a_flood_of_submissions_is_refused_and_does_no_harm() -> None:
    """Thousands of tasks in one turn of the loop: some get EngineBusy, the others their answers."""
    async with running(engine_config(max_waiting=10_000)) as rig:
        outcomes: list[str] = []

        async def run_one() -> None:
            try:
                outcomes.append("right" if await rig.tokens_of([5], 1) == continuation([5], 1) else "wrong")
            except EngineBusy:
                outcomes.append("busy")

        await anyio.wait_all_tasks_blocked()  # so that the scheduler is not in that turn already
        async with anyio.create_task_group() as tasks:
            for _ in range(4_200):
                tasks.start_soon(run_one)
        assert len(outcomes) == 4_200
        assert set(outcomes) == {"right", "busy"}


async def test_ids_are_never_given_twice() -> None:
    """Threads ask for them at once; two requests of one id would share an outbox."""
    engine = Engine(engine_config(), fake_runner(engine_config()), FakeTokenizer())
    ids: list[int] = []
    threads = [
        threading.Thread(target=lambda: ids.extend(engine.next_request_id() for _ in range(1_000)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(1, 4_001))


async def test_before_it_runs_it_takes_nothing() -> None:
    """A facade that is not started gives a clear word instead of waiting for ever."""
    engine = Engine(engine_config(), fake_runner(engine_config()), FakeTokenizer())
    assert engine.stats().free_blocks == engine.config.num_blocks
    with pytest.raises(EngineStoppedError, match="the engine is not running"):
        await engine.submit([])
    await engine.shutdown()


# ---- leaving early -----------------------------------------------------------------------------


async def test_closing_an_outbox_aborts_its_requests_and_no_others() -> None:
    """How a stream that is left, and a cancelled call, give their blocks back."""
    async with running() as rig:
        outbox = await rig.engine.submit([rig.request([9] * 20, 100), rig.request([8] * 20, 100)])
        left = anyio.Event()

        def leave(_plan: object) -> None:
            if len(rig.runner.plans) == 5 and not left.is_set():
                outbox.close()
                left.set()

        rig.runner.before_launch = leave
        assert await rig.tokens_of(PROMPTS[2], 40) == continuation(PROMPTS[2], 40)
        assert left.is_set()
        rows = rig.rows_of_steps()
        assert max(rows[:5]) == 3
        assert set(rows[8:]) == {1}, "the two are in no later step"


async def test_closing_while_waiting_takes_it_off_the_list() -> None:
    """It has no blocks yet, and must not get any."""
    async with running(engine_config(max_requests=1)) as rig:
        first = await rig.engine.submit([rig.request([9], 10)])
        second = await rig.engine.submit([rig.request([8], 10)])
        second.close()
        assert [parcel for parcel in await first.take() if isinstance(parcel, Completion)]
        assert len(rig.runner.plans) == 10, "the second never ran"


async def test_a_cancelled_submit_leaves_nothing_queued() -> None:
    """Cancelled before, while and after the scheduler answers: the request must not run for nobody."""
    async with running() as rig:
        for num_checkpoints in range(8):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rig.tokens_of, [3] * 20, 100)
                for _ in range(num_checkpoints):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await rig.expect_all_free()
        assert len(rig.runner.plans) < 8 * 20
