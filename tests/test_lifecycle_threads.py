"""Random calls from several threads through the sync facade, with requests in flight."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import EngineStoppedError, LifecycleError
from megallm.core_async.plan.phases import Call
from tests.engines import fake_runner
from tests.fake_llm import FakeLLM, greedy
from tests.fakes import FakeRunner, continuation
from tests.test_lifecycle_random import OPERATIONS, Operation, configs, expect_all_there

LIMIT_S = 10.0
"""Far more than any example takes: who is still there then waits for something that does not come."""


@dataclass
class Threads:
    """An engine and the threads that use it. What went wrong in one of them is kept for the test."""

    llm: FakeLLM
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    errors: list[BaseException] = field(default_factory=list[BaseException])
    aborts: int = 0
    epoch: int = 0
    is_stopping: bool = False

    def start(self, function: Callable[..., None], *args: object) -> threading.Thread:
        """Runs a function on a thread of its own."""

        def run() -> None:
            try:
                function(*args)
            except EngineStoppedError as stopped:
                if not self.is_stopping:
                    self.errors.append(stopped)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def play(self, script: list[Operation]) -> None:
        """Does one thread's operations in a row; what waits for output does so on a thread of its own."""
        for operation in script:
            match operation:
                case ("generate", prompts, num_tokens, _):
                    self.start(self.generate, prompts, num_tokens)
                case ("stream", prompt, num_tokens, num_deltas):
                    self.start(self.stream, prompt, num_tokens, num_deltas)
                case ("epoch",):
                    self.epoch += 1
                    self.llm.set_generation_epoch(self.epoch)
                case ("turns", count):
                    self.llm.run_sync(turns(count))
                case (Call.PAUSE, mode, _):
                    self.aborts += mode == "abort"
                    self.llm.pause(mode)
                case (Call.UNPAUSE, _, _):
                    with contextlib.suppress(LifecycleError):  # another thread may have suspended it
                        self.llm.unpause()
                case (Call() as call, _, _):
                    getattr(self.llm, call)()
                case _:
                    raise AssertionError(operation)

    def stop(self, num_turns: int) -> None:
        """Shuts down after a while."""
        self.llm.run_sync(turns(num_turns))
        self.is_stopping = True
        self.llm.shutdown()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Runs a batch, and fails unless each prompt got its own continuation, or was aborted."""
        results = self.llm.generate(prompts, greedy(num_tokens))
        for prompt, result in zip(prompts, results, strict=True):
            self.check(prompt, num_tokens, result.generated_tokens, result.finish_reason)

    def stream(self, prompt: list[int], num_tokens: int, num_deltas: int | None) -> None:
        """Reads a stream, to its end or some deltas of it."""
        tokens: list[int] = []
        with self.llm.stream(prompt, greedy(num_tokens)) as stream:
            for index, delta in enumerate(stream):
                if index == num_deltas:
                    break
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    self.check(prompt, num_tokens, tokens, delta.finish_reason)
        assert tokens == continuation(prompt, len(tokens))

    def check(self, prompt: list[int], num_tokens: int, tokens: list[int], reason: str | None) -> None:
        """Fails unless an output is whole, or the beginning of it where somebody has aborted."""
        if reason == "abort":
            assert self.aborts
            assert tokens == continuation(prompt, len(tokens))
        else:
            assert (tokens, reason) == (continuation(prompt, num_tokens), "length")

    def join(self) -> None:
        """Waits for every thread, and fails for those that failed or hang."""
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a call hangs"
        if self.errors:
            raise self.errors[0]


async def turns(count: int) -> None:
    """Lets the engine's loop turn."""
    from anyio.lowlevel import checkpoint

    for _ in range(count):
        await checkpoint()


@settings(max_examples=150)
@given(
    scripts=st.lists(st.lists(OPERATIONS, max_size=5), min_size=2, max_size=3),
    config=configs(),
    stops_after=st.none() | st.none() | st.integers(0, 200),
)
def test_whatever_threads_call_nothing_hangs_and_nothing_leaks(
    scripts: list[list[Operation]], config: EngineConfig, stops_after: int | None
) -> None:
    """In the end the engine is usable with all it had, or stopped."""
    runner = fake_runner(config)
    llm = FakeLLM(config, runner)
    world = Threads(llm)
    try:
        callers = [world.start(world.play, script) for script in scripts]
        if stops_after is not None:
            callers.append(world.start(world.stop, stops_after))
        for caller in callers:
            caller.join(LIMIT_S)
            assert not caller.is_alive(), "a call hangs"
        if stops_after is None:
            llm.resume()
            llm.unpause()
        world.join()
        if stops_after is None:
            expect_usable(llm, runner)
        else:
            assert llm.engine.phase == "stopped"
    finally:
        llm.shutdown()
    assert [each.name for each in threading.enumerate() if each.name.startswith("megallm")] == []


def expect_usable(llm: FakeLLM, runner: FakeRunner) -> None:
    """Fails unless all rows and blocks are there for new requests, and are given back after them."""
    num_steps = len(runner.plans)
    prompts = [[number] for number in range(llm.engine.config.max_requests)]
    results = llm.generate(prompts, greedy(4))
    assert [result.generated_tokens for result in results] == [continuation(prompt, 4) for prompt in prompts]
    llm.generate([[1]], greedy(1))
    expect_all_there(llm.engine, runner, num_steps)
