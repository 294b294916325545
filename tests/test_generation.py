"""Checked calls become results: what a prompt got, when, and in the order of the call."""

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from megatron.core.inference.inference_request import Status

from megallm.core_async.errors import EngineStoppedError
from megallm.core_async.generation import Drafts, Outcome, results_of, run_to_completion
from megallm.core_async.intake import Call, Intake
from megallm.core_async.messages import Completion
from megallm.core_async.result import Result
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.engines import Rig, running
from tests.fakes import FakeTokenizer, continuation
from tests.small_llm import greedy

pytestmark = pytest.mark.anyio

ADAPTER = TokenizerAdapter(FakeTokenizer())


def prepared(rig: Rig, prompts: object, params: object = None, *, reports_progress: bool = False) -> Call:
    """Gives a checked call of greedy requests."""
    intake = Intake(rig.engine.config, ADAPTER, rig.engine.next_request_id)
    return intake.prepare(prompts, greedy(6) if params is None else params, reports_progress=reports_progress)


async def generated(rig: Rig, prompts: object, params: object = None) -> list[Result]:
    """Runs a call to its end and gives its results."""
    call = prepared(rig, prompts, params)
    outcome: Outcome = await run_to_completion(rig.engine, call.requests, None)
    return results_of(call, outcome, ADAPTER)


@dataclass
class Watcher:
    """Writes down what a progress reader is told."""

    num_tokens: list[int] = field(default_factory=list[int])
    completions: list[Completion] = field(default_factory=list[Completion])

    def add_tokens(self, num_tokens: int) -> None:
        """Keeps the number."""
        self.num_tokens.append(num_tokens)

    def add_completion(self, completion: Completion) -> None:
        """Keeps it."""
        self.completions.append(completion)


async def test_results_come_in_the_order_of_the_prompts() -> None:
    """Requests end in any order: the shortest budget first."""
    budgets = [9, 3, 6, 1]
    async with running() as rig:
        results = await generated(rig, [[10], [11], [12], [13]], [greedy(budget) for budget in budgets])
    assert [result.generated_tokens for result in results] == [
        continuation([10 + index], budget) for index, budget in enumerate(budgets)
    ]


async def test_prompts_that_can_not_run_stand_among_the_others() -> None:
    """One result a prompt, whatever became of it."""
    async with running() as rig:
        results = await generated(rig, [[1], [], [2], [500], [3] * 128, [4] * 129])
    assert [result.failed() for result in results] == [False, True, False, True, False, True]
    assert [result.generated_length for result in results] == [6, 0, 6, 0, 0, 0]
    assert [result.finish_reason for result in results] == [
        "length",
        "error",
        "length",
        "error",
        "length",
        "error",
    ]


async def test_a_call_of_which_nothing_runs_needs_no_step() -> None:
    """Failures and empty budgets are answered without a word to the device."""
    async with running() as rig:
        results = await generated(rig, [[], [500]])
        assert [result.status for result in results] == [Status.FAILED] * 2
        assert await generated(rig, []) == []
        assert rig.runner.plans == []


async def test_a_stopped_engine_refuses_even_that() -> None:
    """A caller learns at the first call that the engine is gone, not at the first good prompt."""
    async with running() as rig:
        await rig.engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await run_to_completion(rig.engine, [], None)


async def test_a_progress_reader_hears_of_every_token_and_every_prompt() -> None:
    """The bar is made of it."""
    async with running() as rig:
        watcher = Watcher()
        call = prepared(rig, [[1], [2], [3]], reports_progress=True)
        outcome = await run_to_completion(rig.engine, call.requests, watcher)
        assert sum(watcher.num_tokens) == 18
        assert {completion.request_id for completion in watcher.completions} == set(outcome.completions)
        assert len(watcher.completions) == 3


async def test_results_made_ahead_are_those_made_at_the_end() -> None:
    """A few after each step, while the device works: a batch that ends at once has little left to make."""
    prompts = [[index] for index in range(10)]
    async with running() as rig:
        call = prepared(rig, prompts)
        drafts = Drafts(call, ADAPTER)
        outcome = await run_to_completion(rig.engine, call.requests, None, drafts)
        assert drafts.num_begun >= 8
        ahead, late = results_of(call, outcome, ADAPTER), await generated(rig, prompts)
    assert drafts.num_begun == 0
    expect_alike(ahead, late)


async def test_results_of_prompts_that_end_early_are_complete_before_the_last_one_ends() -> None:
    """What is left to do between the last step and the call's return is a few results, not hundreds."""
    prompts, params = [[index] for index in range(8)], [greedy(5 + index) for index in range(8)]
    async with running() as rig:
        call = prepared(rig, prompts, params)
        drafts = Drafts(call, ADAPTER)
        outcome = await run_to_completion(rig.engine, call.requests, None, drafts)
        assert drafts.num_complete >= 5
        ahead, late = results_of(call, outcome, ADAPTER), await generated(rig, prompts, params)
    assert (drafts.num_begun, drafts.num_complete) == (0, 0)
    assert [result.finish_reason for result in ahead] == ["length"] * 8
    expect_alike(ahead, late)


def expect_alike(ahead: list[Result], late: list[Result]) -> None:
    """Fails unless results say the same, apart from times."""
    one: Any  # megatron declares fields None at first
    other: Any
    for one, other in zip(ahead, late, strict=True):
        assert (one.prompt, one.generated_text) == (other.prompt, other.generated_text)
        assert one.prompt_tokens.equal(other.prompt_tokens)
        assert [event.type for event in one.events] == [event.type for event in other.events]
        assert one.events[0].timestamp <= one.events[-1].timestamp


async def test_what_takes_long_is_left_to_the_end() -> None:
    """Texts of single tokens and log-probs would hold up the loop, and every stream in it."""
    params = [greedy(5, return_segments=True), greedy(5, return_log_probs=True), greedy(5), greedy(5)]
    async with running() as rig:
        call = prepared(rig, [[1], [2], [3], [4]], params)
        drafts = Drafts(call, ADAPTER)
        outcome = await run_to_completion(rig.engine, call.requests, None, None)
        drafts.make_some(outcome.completions.values(), outcome.times)
        assert (drafts.num_begun, drafts.num_complete) == (2, 2)


async def test_many_that_end_together_are_completed_some_at_a_time() -> None:
    """All at once they would keep the loop from the next step."""
    most = Drafts.COMPLETED_AT_ONCE
    async with running() as rig:
        call = prepared(rig, [[index] for index in range(most + 4)], greedy(1))
        drafts = Drafts(call, ADAPTER)
        outcome = await run_to_completion(rig.engine, call.requests, None, None)
        while drafts.num_begun < most + 4:
            drafts.make_some((), outcome.times)
        drafts.make_some(outcome.completions.values(), outcome.times)
        assert (drafts.num_begun, drafts.num_complete) == (4, most)
        drafts.make_some((), outcome.times)
        assert (drafts.num_begun, drafts.num_complete) == (0, most + 4)


async def test_results_of_long_prompts_are_not_made_ahead() -> None:
    """They would hold up the loop, and every stream in it."""
    async with running() as rig:
        call = prepared(rig, [[1], [2]])
        call.entries[0].token_ids = [1] * (Drafts.MAX_TOKENS + 1)
        drafts = Drafts(call, ADAPTER)
        outcome = await run_to_completion(rig.engine, call.requests, None, None)
        drafts.make_some((), outcome.times)
        assert drafts.num_begun == 1
        drafts.make_some(outcome.completions.values(), outcome.times)
        assert drafts.num_complete == 1


async def test_calls_of_many_tasks_batch_together() -> None:
    """A server has a task for each client."""
    async with running() as rig:
        tokens: dict[int, list[int]] = {}

        async def call(index: int) -> None:
            (result,) = await generated(rig, [[index]])
            tokens[index] = result.generated_tokens

        async with anyio.create_task_group() as tasks:
            for index in range(10):
                tasks.start_soon(call, index)
        assert tokens == {index: continuation([index], 6) for index in range(10)}
        assert max(rig.rows_of_steps()) > 5


async def test_a_cancelled_call_leaves_the_others_alone() -> None:
    """By scope, at any moment; the neighbours get exactly what they would have got."""
    async with running() as rig:
        for num_checkpoints in range(12):
            stayed: list[Result] = []

            async def stay(stayed: list[Result] = stayed) -> None:
                stayed += await generated(rig, [[7], [8]])

            async with anyio.create_task_group() as tasks, anyio.create_task_group() as leaving:
                leaving.start_soon(generated, rig, [[5] * 40, [6] * 40], greedy(80))
                tasks.start_soon(stay)
                for _ in range(num_checkpoints):
                    await anyio.lowlevel.checkpoint()
                leaving.cancel_scope.cancel()
            expected = [continuation([7], 6), continuation([8], 6)]
            assert [result.generated_tokens for result in stayed] == expected
            await rig.expect_all_free()
