"""Thousands of aborts at random moments: nothing leaks, nothing breaks, and no neighbour's text changes."""

import random
from collections.abc import Sequence
from contextlib import closing

import anyio
import pytest

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.messages import Completion, Delta
from tests.engines import Rig, engine_config, running
from tests.fakes import continuation
from tests.loops import EVERY_LOOP
from tests.small_llm import expected, greedy, native_llm, settings

pytestmark = [pytest.mark.anyio, EVERY_LOOP]

NUM_ABORTS = 2_000
NUM_STEPS = 12
"""Turns of the loop at most before a request is left; each step takes some of them."""


class Aborter:
    """Requests that are left at random moments, beside neighbours that run to their ends."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._random = random.Random(seed)
        self.num_aborts = 0
        self.moments: set[str] = set()
        """What those that were left had been doing."""

    def prompt(self) -> list[int]:
        """Gives a prompt of its own."""
        return [self._random.randrange(97) for _ in range(self._random.randrange(1, 40))]

    async def neighbour(self) -> None:
        """Runs a request to its end, which is what it would be alone."""
        prompt, num_tokens = self.prompt(), self._random.randrange(1, 40)
        assert await self._rig.tokens_of(prompt, num_tokens) == continuation(prompt, num_tokens)

    async def leave_some(self) -> None:
        """Submits requests and leaves them: waiting, in a prompt, in an output, at the end, twice."""
        budgets = [self._random.randrange(1, 20) for _ in range(self._random.randrange(1, 5))]
        requests = [
            self._rig.request(self.prompt(), budget, is_streamed=self._random.random() < 0.5)
            for budget in budgets
        ]
        outbox = await self._rig.engine.submit(requests)
        how = self._random.choice(["at once", "turns", "turns", "tokens", "last"])
        if how == "turns":
            for _ in range(self._random.randrange(NUM_STEPS)):
                await anyio.lowlevel.checkpoint()
        elif how == "tokens":
            await outbox.take()
        elif how == "last":
            await self._until_some_end(outbox, len(requests))
        self.moments.add(how)
        for _ in range(self._random.randrange(1, 3)):
            outbox.close()
        self.num_aborts += len(requests)

    @staticmethod
    async def _until_some_end(outbox: Outbox[Parcel], num_requests: int) -> None:
        """Waits until at most one has not ended."""
        num_ended = 0
        while num_ended < max(num_requests - 1, 1):
            for parcel in await outbox.take():
                num_ended += isinstance(parcel, Completion) or (
                    isinstance(parcel, Delta) and parcel.finish_reason is not None
                )


@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as on a CPU", "as on a GPU"])
async def test_thousands_of_aborts_leak_nothing_and_change_no_neighbour(runs_at_launch: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Blocks, rows and prefixes are all short, so that every kind of request is met at every moment."""
    config = engine_config(num_blocks=48, max_requests=8, max_tokens=24, chunks_prompts=True)
    async with running(config, runs_at_launch=runs_at_launch) as rig:
        aborter = Aborter(rig, seed=7)
        while aborter.num_aborts < NUM_ABORTS:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(aborter.neighbour)
                for _ in range(8):
                    tasks.start_soon(aborter.leave_some)
        assert aborter.moments == {"at once", "turns", "tokens", "last"}
        assert rig.engine.stats().preemptions > 0
        stats = await rig.expect_all_free()
        assert stats.step == len(rig.runner.plans)


async def test_an_abort_of_what_is_not_there_is_nothing() -> None:
    """It has ended a moment ago, or was aborted before: the engine's books do not care."""
    async with running() as rig:
        requests = [rig.request([1, 2], 3), rig.request([3], 40)]
        with closing(await rig.engine.submit(requests)) as outbox:
            assert len(await outbox.take()) == 1
            outbox.close()
            outbox.close()
        await rig.tokens_of([5], 4)
        outbox.close()
        assert rig.engine.stats().running == 0


@pytest.mark.parametrize("way", ["stream", "generate"])
async def test_aborts_of_a_real_model_leak_nothing_and_change_no_neighbour(way: str) -> None:
    """The same through the facade: streams left, and calls cancelled, over real attention and real blocks."""
    chosen = random.Random(11)
    prompts = [[chosen.randrange(96) for _ in range(length)] for length in (1, 9, 30)]
    config = settings(num_blocks=40, max_requests=6, max_tokens=16, enable_chunked_prefill=True)
    async with native_llm(config=config) as llm:
        num_aborts = 0
        while num_aborts < 100:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_expect_right, llm, chosen.choice(prompts))
                for _ in range(4):
                    tasks.start_soon(_leave, llm, way, chosen.choice(prompts), chosen.randrange(20))
                    num_aborts += 1


async def _expect_right(llm: MegatronAsyncLLM, prompt: Sequence[int]) -> None:
    results = await llm.generate([list(prompt)], greedy(12))
    assert isinstance(results, list)
    assert results[0].generated_tokens == expected(prompt, 12)


async def _leave(llm: MegatronAsyncLLM, way: str, prompt: Sequence[int], moment: int) -> None:
    """Leaves a stream after some tokens; cancels a call after some turns of the loop."""
    if way == "stream":
        num_tokens = 0
        async with llm.stream(list(prompt), greedy(moment + 3)) as stream:
            async for delta in stream:
                num_tokens += len(delta.token_ids)
                if num_tokens >= moment:
                    break
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(llm.generate, list(prompt), greedy(40))
        for _ in range(moment):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
