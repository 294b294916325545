"""Both facades round the fake model, driven alike from an async test, and a runner that a test can hold and break."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
from anyio import to_thread
from msgspec import structs

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.builder import Parts
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.host import EngineHost
from megallm.core_async.intake import Intake
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.messages import Delta, StepPlan
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.sync.llm import MegatronLLM
from tests.engines import engine_config
from tests.fakes import FakeRunner, FakeTokenizer

type Facade = Literal["sync", "native", "hosted"]

ANSWER_S = 5.0
"""Longer than anything here takes."""


class HeldRunner(FakeRunner):
    """A fake model that a test can hold and break at any step, and where it releases and restores its cache."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            num_blocks=config.num_blocks, block_size=config.block_size, max_requests=config.max_requests
        )
        self.is_held = threading.Event()
        self._hold: str | None = None
        self._goes = threading.Event()
        self._failures: dict[str, Exception] = {}

    def hold(self, what: str) -> None:
        """Makes it wait for `go` at a step ("step 3"), at "release" or at "restore"; `is_held` says that it does."""
        self.is_held.clear()
        self._goes.clear()
        self._hold = what

    def go(self) -> None:
        """Lets it go on."""
        self._hold = None
        self._goes.set()

    def break_at(self, what: str, failure: Exception) -> None:
        """Makes it fail there, every time."""
        self._failures[what] = failure

    def launch(self, plan: StepPlan) -> Any:  # Any: a PendingStep
        """See FakeRunner."""
        self._meet(f"step {plan.step}")
        return super().launch(plan)

    def release_cache(self, *, keep_contents: bool) -> None:
        """See FakeRunner."""
        self._meet("release")
        super().release_cache(keep_contents=keep_contents)

    def restore_cache(self) -> None:
        """See FakeRunner."""
        self._meet("restore")
        super().restore_cache()

    def _meet(self, what: str) -> None:
        if what == self._hold:
            self.is_held.set()
            assert self._goes.wait(ANSWER_S), f"held at {what}, and nobody lets it go on"
        if what in self._failures:
            raise self._failures[what]


def fake_parts(config: EngineConfig, runner: FakeRunner) -> Parts:
    """Gives the parts of a facade round a fake model."""
    adapter = TokenizerAdapter(FakeTokenizer())
    engine = Engine(config, runner, adapter)
    return Parts(engine, Intake(config, adapter, engine.next_request_id), adapter)


class FakeLLM(MegatronLLM):
    """The sync facade, of a fake model."""

    def __init__(self, config: EngineConfig, runner: FakeRunner, *, use_coordinator: bool = True) -> None:
        """Starts, as the facade does."""
        self._parts = fake_parts(config, runner)
        self._use_coordinator = use_coordinator
        self._host = EngineHost(self._parts.engine, "asyncio")
        self._finalizer = self._host.close_with(self)


class FakeAsyncLLM(MegatronAsyncLLM):
    """The async facade, of a fake model."""

    def __init__(self, config: EngineConfig, runner: FakeRunner, *, use_coordinator: bool = True) -> None:
        """Starts nothing, as the facade does not."""
        self._parts = fake_parts(config, runner)
        self._use_coordinator = use_coordinator
        self._backend = "asyncio"
        self._tasks = None
        self._calls = None
        self._host = None


class Driver:
    """One facade of either kind, each call awaited: those of the sync one are made on threads."""

    def __init__(self, llm: MegatronLLM | MegatronAsyncLLM, runner: HeldRunner) -> None:
        self.llm = llm
        self.runner = runner

    @property
    def phase(self) -> str:
        """Where the engine is."""
        return self.llm.engine.phase

    async def call(self, name: str, *args: object) -> Any:  # Any: whatever the call gives
        """Makes a call by its name."""
        method = getattr(self.llm, name)
        if isinstance(self.llm, MegatronLLM):
            return await to_thread.run_sync(method, *args)
        return await method(*args)

    async def generate(self, prompts: list[list[int]], num_tokens: int = 8) -> list[Result]:
        """Runs a batch."""
        return await self.call("generate", prompts, greedy(num_tokens))

    async def stream(self, prompt: list[int], num_tokens: int = 8) -> AsyncIterator[Delta]:
        """Reads a stream."""
        stream = self.llm.stream(prompt, greedy(num_tokens))
        while (delta := await self.next(stream)) is not None:
            yield delta

    async def next(self, stream: Any) -> Delta | None:  # Any: either facade's stream
        """Reads one delta; None after the last."""
        if isinstance(self.llm, MegatronLLM):
            return await to_thread.run_sync(next, stream, None)
        return await anext(stream, None)

    async def until_held(self) -> None:
        """Waits until the runner is where the test holds it."""
        assert await to_thread.run_sync(self.runner.is_held.wait, ANSWER_S), "it never came there"

    async def enter(self, phase: str) -> None:
        """Brings the engine into a phase that it stays in."""
        if phase == "suspended":
            await self.call("suspend")
        else:
            await self.call("resume")
            await self.call("unpause" if phase == "running" else "pause")
        assert self.phase == phase


def greedy(num_tokens: int) -> SamplingParams:
    """Gives greedy parameters that no token ends."""
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, termination_id=-1)


def lifecycle_config(
    kv_mode: KvMode = "persist",
    **limits: Any,  # Any: engine_config's
) -> EngineConfig:
    """Gives limits for the fake model."""
    return structs.replace(engine_config(**limits), kv_mode=kv_mode)


@asynccontextmanager
async def driving(
    facade: Facade, config: EngineConfig | None = None, *, use_coordinator: bool = True
) -> AsyncGenerator[Driver]:
    """Runs a facade round a block, and stops it."""
    limits = lifecycle_config() if config is None else config
    runner = HeldRunner(limits)
    if facade == "sync":
        with FakeLLM(limits, runner, use_coordinator=use_coordinator) as llm:
            yield Driver(llm, runner)
            await to_thread.run_sync(llm.shutdown)
        return
    async_llm = FakeAsyncLLM(limits, runner, use_coordinator=use_coordinator)
    if facade == "native":
        async with async_llm:
            yield Driver(async_llm, runner)
        return
    try:
        yield Driver(async_llm, runner)
    finally:
        with anyio.CancelScope(shield=True):
            await async_llm.shutdown()
