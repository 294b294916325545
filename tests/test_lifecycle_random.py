"""Random calls of every kind from several tasks at once: the table holds, and nothing leaks or hangs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineStoppedError, LifecycleError
from megallm.core_async.messages import unpack_ints
from megallm.core_async.plan.phases import Call
from megallm.core_async.result import Result
from tests.checkpoints import AtAwait
from tests.engines import fake_runner, inline_worker
from tests.fake_llm import FakeAsyncLLM, greedy, lifecycle_config
from tests.fakes import FakeRunner, continuation
from tests.plan.test_phases import one_at_a_time

type Operation = tuple[Any, ...]  # its name, and what it takes

LIMIT_S = 10.0
"""Far more than any example takes: who needs more waits for something that does not come."""

PROMPTS = st.lists(st.integers(0, 95), min_size=1, max_size=12)
PATIENCE = st.none() | st.integers(1, 12)
"""After how many awaits a caller gives up, if it does."""
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.tuples(st.just("generate"), st.lists(PROMPTS, min_size=1, max_size=3), st.integers(1, 20), PATIENCE),
    st.tuples(st.just("stream"), PROMPTS, st.integers(1, 20), st.none() | st.integers(0, 6)),
    st.tuples(st.just(Call.PAUSE), st.sampled_from(["keep", "wait", "abort"]), PATIENCE),
    st.tuples(st.sampled_from([Call.UNPAUSE, Call.SUSPEND, Call.RESUME]), st.none(), PATIENCE),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("turns"), st.integers(1, 30)),
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Gives limits under which requests wait, lose their blocks, and share them."""
    config = lifecycle_config(
        draw(st.sampled_from(["persist", "offload", "recompute"])),
        num_blocks=draw(st.integers(8, 24)),
        max_requests=draw(st.integers(1, 4)),
        max_tokens=draw(st.integers(6, 40)),
        max_sequence_length=32,
        chunks_prompts=draw(st.booleans()),
    )
    return structs.replace(config, shares_prefixes=draw(st.booleans()))


@dataclass
class Made:
    """A lifecycle call, and what it was answered."""

    call: Call
    answer: str | None = None


@dataclass
class World:
    """An engine, the calls made so far in the order the engine got them, and all who wait."""

    llm: FakeAsyncLLM
    runner: FakeRunner
    waiting: TaskGroup
    made: list[Made] = field(default_factory=list[Made])
    aborts: int = 0
    epoch: int = 0

    async def play(self, script: list[Operation]) -> None:
        """Does one task's operations in a row; what waits for output does so in a task of its own."""
        for operation in script:
            match operation:
                case ("generate", prompts, num_tokens, patience):
                    self.waiting.start_soon(self.generate, prompts, num_tokens, patience)
                case ("stream", prompt, num_tokens, num_deltas):
                    self.waiting.start_soon(self.stream, prompt, num_tokens, num_deltas)
                case ("epoch",):
                    await self.set_epoch()
                case ("turns", count):
                    for _ in range(count):
                        await anyio.lowlevel.checkpoint()
                case (Call() as call, mode, patience):
                    await self.make(call, mode, patience)
                case _:
                    raise AssertionError(operation)

    async def make(self, call: Call, mode: str | None = None, patience: int | None = None) -> None:
        """Makes a lifecycle call, and checks what holds when it is answered."""
        made = Made(call)
        self.made.append(made)
        self.aborts += mode == "abort"
        method: Callable[..., Awaitable[None]] = getattr(self.llm, call)
        try:
            made.answer = await giving_up(patience, partial(method, *([mode] if mode else [])))
        except (LifecycleError, EngineStoppedError) as error:
            made.answer = type(error).__name__
        if made.answer == "done" and self.made[-1] is made:
            await self.expect_settled(made)

    async def expect_settled(self, made: Made) -> None:
        """Fails unless the engine is where the last call of all has brought it, and stays there."""
        _, phase = one_at_a_time([each.call for each in self.made])
        assert self.llm.engine.phase == phase
        num_steps = len(self.runner.plans)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        if self.made[-1] is made and phase in ("paused", "suspended"):
            assert len(self.runner.plans) == num_steps, f"a step while {phase}"

    async def set_epoch(self) -> None:
        """Goes on to the next number of the weights."""
        self.epoch += 1
        try:
            await self.llm.set_generation_epoch(self.epoch)
        except EngineStoppedError:
            assert self.is_stopped

    async def generate(self, prompts: list[list[int]], num_tokens: int, patience: int | None) -> None:
        """Runs a batch, and fails unless each prompt got its own continuation, or was aborted."""
        results: list[Result] = []

        async def run() -> None:
            got = await self.llm.generate(prompts, greedy(num_tokens))
            results.extend(got if isinstance(got, list) else [got])

        try:
            answer = await giving_up(patience, run)
        except EngineStoppedError:
            assert self.is_stopped
            return
        assert len(results) == (len(prompts) if answer == "done" else 0)
        for prompt, result in zip(prompts, results, strict=False):
            self.check(prompt, num_tokens, result.generated_tokens, result.finish_reason)
            epochs = [epoch for _, epoch in result.policy_epoch or []]
            assert epochs == sorted(set(epochs)), "each epoch once, in order"

    async def stream(self, prompt: list[int], num_tokens: int, num_deltas: int | None) -> None:
        """Reads a stream, to its end or some deltas of it, and fails unless that is the continuation."""
        tokens: list[int] = []
        async with self.llm.stream(prompt, greedy(num_tokens)) as stream:
            try:
                while num_deltas is None or num_deltas:
                    delta = await anext(stream)
                    tokens += delta.token_ids
                    if delta.finish_reason is not None:
                        self.check(prompt, num_tokens, tokens, delta.finish_reason)
                        return
                    num_deltas = None if num_deltas is None else num_deltas - 1
            except EngineStoppedError:
                assert self.is_stopped
        assert tokens == continuation(prompt, len(tokens))

    def check(self, prompt: list[int], num_tokens: int, tokens: list[int], reason: str | None) -> None:
        """Fails unless an output is whole, or the beginning of it where somebody has aborted."""
        if reason == "abort":
            assert self.aborts
            assert tokens == continuation(prompt, len(tokens))
        else:
            assert (tokens, reason) == (continuation(prompt, num_tokens), "length")

    @property
    def is_stopped(self) -> bool:
        """Whether anybody has called shutdown."""
        return any(made.call is Call.SHUTDOWN for made in self.made)

    def check_answers(self) -> None:
        """Fails unless each call was answered as the table says."""
        expected, _ = one_at_a_time([made.call for made in self.made])
        calls = [made.call for made in self.made]
        stopped_at = calls.index(Call.SHUTDOWN) if self.is_stopped else len(calls)
        for index, (made, answer) in enumerate(zip(self.made, expected, strict=True)):
            if made.answer in (answer, "given up"):
                continue
            is_overtaken = index < stopped_at < len(calls)
            assert is_overtaken, f"call {index} of {calls} gave {made.answer}, not {answer}"
            assert made.answer == "EngineStoppedError"

    async def expect_usable(self) -> None:
        """Fails unless all rows and blocks are there for new requests, and are given back after them."""
        config = self.llm.engine.config
        num_steps = len(self.runner.plans)
        prompts = [[number] for number in range(config.max_requests)]
        got = await self.llm.generate(prompts, greedy(4))
        assert isinstance(got, list)
        assert [result.generated_tokens for result in got] == [continuation(prompt, 4) for prompt in prompts]
        await self.llm.generate([1], greedy(1))  # brings the figures up to date
        expect_all_there(self.llm.engine, self.runner, num_steps)


def expect_all_there(engine: Engine, runner: FakeRunner, num_steps: int) -> None:
    """Fails unless no block is held, and all rows were used at once since `num_steps` steps were made."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == engine.config.num_blocks
    num_rows = max(len(unpack_ints(plan.rows)) for plan in runner.plans[num_steps:])
    assert num_rows == engine.config.max_requests, "a row is lost"


async def giving_up(patience: int | None, call: Callable[[], Awaitable[object]]) -> str:
    """Makes a call, and is cancelled at one of its awaits if it is impatient; says what came of it."""

    async def run() -> None:
        await call()

    with anyio.CancelScope() as scope:
        await (run() if patience is None else AtAwait(patience, run(), scope.cancel))
        return "done"
    return "given up"


@settings(max_examples=300)
@given(
    scripts=st.lists(st.lists(OPERATIONS, max_size=7), min_size=1, max_size=3),
    config=configs(),
    stops_after=st.none() | st.integers(0, 80),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_whatever_is_called_the_table_holds_and_nothing_leaks(
    scripts: list[list[Operation]], config: EngineConfig, stops_after: int | None, backend: str
) -> None:
    """Outputs are the undisturbed ones; in the end the engine is usable with all it had, or stopped."""
    runner = fake_runner(config)

    async def play(world: World) -> None:
        async with world.waiting:
            async with anyio.create_task_group() as callers:
                for script in scripts:
                    callers.start_soon(world.play, script)
                if stops_after is not None:
                    callers.start_soon(world.play, [("turns", stops_after), (Call.SHUTDOWN, None, None)])
            await world.make(Call.RESUME)
            await world.make(Call.UNPAUSE)
        world.check_answers()
        if stops_after is None:
            await world.expect_usable()
        else:
            assert world.llm.engine.phase == "stopped"

    async def run() -> None:
        llm = FakeAsyncLLM(config, runner, make_worker=lambda each: inline_worker(each, 0.0))
        with anyio.fail_after(LIMIT_S):
            async with llm:
                await play(World(llm, runner, anyio.create_task_group()))

    anyio.run(run, backend=backend)
