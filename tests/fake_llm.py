"""Both facades round a fake model that a test can hold and break; an async test drives them alike."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from msgspec import structs

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.actors.worker import Worker
from megallm.core_async.builder import Parts
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine, WorkerActor
from megallm.core_async.host import EngineHost
from megallm.core_async.intake import Intake
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.messages import Delta, Ints, StepPlan
from megallm.core_async.protocols import Runner
from megallm.core_async.ranks.calls import Calls
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.sync.llm import MegatronLLM
from tests.engines import engine_config
from tests.fakes import FakeRunner, FakeTokenizer

type Facade = Literal["sync", "native", "hosted"]

ANSWER_S = 10.0
"""Longer than anything here takes, also on a busy machine."""


class HeldRunner(FakeRunner):
    """A fake model that a test can hold and break: at any step, and at the cache's release and restoring."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            num_blocks=config.num_blocks, block_size=config.block_size, max_requests=config.max_requests
        )
        self.is_held = threading.Event()
        """Set while it waits."""
        self._hold: str | None = None
        self._goes = threading.Event()
        self._failures: dict[str, Exception] = {}

    def hold(self, what: str) -> None:
        """Makes it wait for `go` at a step ("step 3"), at "release" or at "restore"."""
        self.is_held.clear()
        self._goes.clear()
        self._hold = what

    def go(self) -> None:
        """Lets it go on."""
        self._hold = None
        self.is_held.clear()
        self._goes.set()

    def break_at(self, what: str, failure: Exception) -> None:
        """Makes it fail there, every time."""
        self._failures[what] = failure

    def launch(self, plan: StepPlan) -> Any:  # Any: a PendingStep
        """See FakeRunner."""
        self._meet(f"step {plan.step}")
        return super().launch(plan)

    def release_cache(self, kept: Ints) -> None:
        """See FakeRunner."""
        self._meet("release")
        super().release_cache(kept)

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


def fake_parts(
    config: EngineConfig, runner: FakeRunner, make_worker: Callable[[Runner], WorkerActor] = Worker
) -> Parts:
    """Gives the parts of a facade round a fake model."""
    adapter = TokenizerAdapter(FakeTokenizer())
    engine = Engine(config, runner, adapter, make_worker=make_worker)
    return Parts(engine, Intake(config, adapter, engine.next_request_id), adapter, Calls(engine))


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

    def __init__(
        self,
        config: EngineConfig,
        runner: FakeRunner,
        *,
        use_coordinator: bool = True,
        make_worker: Callable[[Runner], WorkerActor] = Worker,
    ) -> None:
        """Starts nothing, as the facade does not. With a worker in a task nothing depends on threads."""
        self._parts = fake_parts(config, runner, make_worker)
        self._use_coordinator = use_coordinator
        self._backend = "asyncio"
        self._tasks = None
        self._calls = None
        self._host = None
        self._is_closed = False


class Driver:
    """One facade of either kind, each call awaited: those of the sync one are made on threads."""

    def __init__(self, llm: MegatronLLM | MegatronAsyncLLM, runner: HeldRunner, tasks: TaskGroup) -> None:
        self.llm = llm
        self.runner = runner
        self._tasks = tasks

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

    def start(self, call: Awaitable[Any]) -> "Pending":  # Any: the same
        """Makes a call, or whatever it is, in a task of its own."""
        return Pending(self._tasks, call)

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

    async def leave(self, stream: Any) -> None:  # Any: the same
        """Leaves a stream early."""
        if isinstance(self.llm, MegatronLLM):
            stream.close()
        else:
            await stream.aclose()

    async def until_held(self) -> None:
        """Waits until the runner is where the test holds it."""
        assert await to_thread.run_sync(self.runner.is_held.wait, ANSWER_S), "it never came there"

    async def until(self, phase: str) -> None:
        """Waits until the engine is in a phase, which somebody else brings it into."""
        await eventually(lambda: self.phase == phase)

    async def enter(self, phase: str) -> None:
        """Brings the engine into a phase that it stays in."""
        if phase == "suspended":
            await self.call("suspend")
        else:
            await self.call("resume")
            await self.call("unpause" if phase == "running" else "pause")
        assert self.phase == phase


class Pending:
    """A call in a task of its own, and what came of it."""

    def __init__(self, tasks: TaskGroup, call: Awaitable[Any]) -> None:  # Any: whatever the call gives
        self._has_ended = anyio.Event()
        self._value: Any = None  # Any: the same
        self._error: Exception | None = None
        tasks.start_soon(self._run, call)

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self._has_ended.is_set()

    async def outcome(self) -> Any:  # Any: the same
        """Waits for the call, not for ever; gives its value or raises its error."""
        if (error := await self.error()) is not None:
            raise error
        return self._value

    async def error(self) -> Exception | None:
        """Waits for the call in the same way; gives its error, None where there is none."""
        with anyio.fail_after(ANSWER_S):
            await self._has_ended.wait()
        return self._error

    async def _run(self, call: Awaitable[Any]) -> None:  # Any: the same
        try:
            self._value = await call
        except Exception as error:  # noqa: BLE001 - it is the test's to judge
            self._error = error
        self._has_ended.set()


async def eventually(holds: Callable[[], object]) -> None:
    """Waits for something that another thread brings about."""
    with anyio.fail_after(ANSWER_S):
        while not holds():
            await anyio.lowlevel.checkpoint()


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
    """Runs a facade round a block, and stops it; then the calls that the block has started end as well."""
    limits = lifecycle_config() if config is None else config
    runner = HeldRunner(limits)
    async with anyio.create_task_group() as tasks:
        if facade == "sync":
            llm = FakeLLM(limits, runner, use_coordinator=use_coordinator)
            try:
                yield Driver(llm, runner, tasks)
            finally:
                runner.go()
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(llm.shutdown)
            return
        async_llm = FakeAsyncLLM(limits, runner, use_coordinator=use_coordinator)
        if facade == "native":
            async with async_llm:
                try:
                    yield Driver(async_llm, runner, tasks)
                finally:
                    runner.go()
            return
        try:
            yield Driver(async_llm, runner, tasks)
        finally:
            runner.go()
            with anyio.CancelScope(shield=True):
                await async_llm.shutdown()
