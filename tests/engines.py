"""Engines round the fake model, run in the test's own loop, and the books that each must leave balanced."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

import anyio

from megallm.core_async.actors.worker import Worker
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine, WorkerActor
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.messages import (
    Completion,
    EngineStats,
    NewRequest,
    RequestId,
    Sampling,
    TextSpec,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.protocols import Runner
from tests.fakes import VOCAB_SIZE, FakeRunner, FakeTokenizer, InlineWorker

GREEDY = Sampling(temperature=0.0)


def engine_config(
    *,
    num_blocks: int = 64,
    max_requests: int = 16,
    max_tokens: int = 256,
    max_sequence_length: int = 128,
    max_waiting: int = 1000,
    chunks_prompts: bool = False,
) -> EngineConfig:
    """Gives limits for the fake model: blocks of 4 tokens."""
    return EngineConfig(
        block_size=4,
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_sequence_length=max_sequence_length,
        max_waiting=max_waiting,
        chunks_prompts=chunks_prompts,
        vocab_size=VOCAB_SIZE,
    )


def fake_runner(config: EngineConfig) -> FakeRunner:
    """Gives the fake model with as much room as the limits say."""
    return FakeRunner(
        num_blocks=config.num_blocks, block_size=config.block_size, max_requests=config.max_requests
    )


@dataclass
class Rig:
    """A running engine and the fake model in it."""

    engine: Engine
    runner: FakeRunner
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def request(
        self,
        prompt: Sequence[int],
        num_tokens: int = 8,
        *,
        stop_ids: tuple[int, ...] = (),
        stop_words: tuple[str, ...] = (),
        is_streamed: bool = False,
        reports_progress: bool = False,
    ) -> NewRequest:
        """Gives a greedy request."""
        request_id: RequestId = self.engine.next_request_id()
        return NewRequest(
            request_id=request_id,
            prompt=pack_ints(list(prompt)),
            max_new_tokens=num_tokens,
            stop_token_ids=stop_ids,
            sampling=GREEDY,
            text=TextSpec(
                request_id=request_id,
                stop_words=stop_words,
                is_streamed=is_streamed,
                reports_progress=reports_progress,
            ),
        )

    async def complete(self, *requests: NewRequest) -> list[Completion]:
        """Submits requests at once, waits for all of them, and gives what each got, in order."""
        completions: dict[RequestId, Completion] = {}
        with closing(await self.engine.submit(requests)) as outbox:
            while len(completions) < len(requests):
                for parcel in await outbox.take():
                    if isinstance(parcel, Completion):
                        completions[parcel.request_id] = parcel
        return [completions[request.request_id] for request in requests]

    async def tokens_of(self, prompt: Sequence[int], num_tokens: int = 8) -> list[int]:
        """Gives the greedy continuation of one prompt, from the engine."""
        (completion,) = await self.complete(self.request(prompt, num_tokens))
        return completion.token_ids

    def rows_of_steps(self) -> list[int]:
        """Gives how many rows each step had so far."""
        return [len(unpack_ints(plan.rows)) for plan in self.runner.plans]

    async def expect_all_free(self) -> EngineStats:
        """Fails unless all blocks are free once nothing runs; one more request updates the figures."""
        await self.tokens_of([1], 1)
        stats = self.engine.stats()
        expect_balanced(stats, self.engine.config.num_blocks)
        return stats


def expect_balanced(stats: EngineStats, num_blocks: int) -> None:
    """Fails unless nothing runs, nothing waits, and all blocks are free."""
    seen = (stats.running, stats.waiting, stats.used_blocks, stats.free_blocks)
    assert seen == (0, 0, 0, num_blocks), f"(running, waiting, used, free) is {seen} of {num_blocks} blocks"


def inline_worker(runner: Runner, step_s: float) -> InlineWorker:
    """Gives a worker without a thread, whose steps take `step_s` on the loop's clock."""
    worker = InlineWorker(runner)
    worker.step_s = step_s
    return worker


@asynccontextmanager
async def running(
    config: EngineConfig | None = None,
    *,
    step_s: float = 0.0,
    is_threaded: bool = False,
    runs_at_launch: bool = True,
) -> AsyncGenerator[Rig]:
    """Runs an engine in the test's loop and stops it; unless the test ended it, its blocks are all free then.

    `is_threaded`: with the real worker and its thread, otherwise with one in a task.
    `runs_at_launch`: as on a CPU, otherwise as on a GPU.
    """
    limits = engine_config() if config is None else config
    runner = fake_runner(limits)
    runner.runs_at_launch = runs_at_launch

    def make_worker(runner: Runner) -> WorkerActor:
        return Worker(runner) if is_threaded else inline_worker(runner, step_s)

    rig = Rig(Engine(limits, runner, FakeTokenizer(), make_worker=make_worker), runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(rig.engine.run)
        yield rig
        if is_alive(rig.engine):
            await rig.expect_all_free()
        await rig.engine.shutdown()


def is_alive(engine: Engine) -> bool:
    """Whether the engine takes calls."""
    try:
        engine.check_alive()
    except (EngineDeadError, EngineStoppedError):
        return False
    return True
