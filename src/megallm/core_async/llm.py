"""MegatronAsyncLLM: the engine for programs that have an event loop, trio's or asyncio's."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import anyio
import torch
from anyio.abc import TaskGroup
from megatron.core.inference.config import InferenceConfig

from megallm.core_async.builder import build
from megallm.core_async.engine import Engine
from megallm.core_async.generation import results_of, run_to_completion
from megallm.core_async.host import EngineHost
from megallm.core_async.intake import Call, one_prompt
from megallm.core_async.kit.foreign import wait_for
from megallm.core_async.loop_thread import Backend
from megallm.core_async.messages import EngineStats
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.streaming import AsyncStream, StreamState

STOP_S = 15.0
"""How long leaving the block waits for the engine's stop, also when it is cancelled."""
LONG_CALL = 20_000
"""Characters of prompts from which on they are tokenised off the loop."""


class MegatronAsyncLLM:
    """Generates with a megatron-core model, natively in the caller's event loop.

    `async with` runs the engine's tasks in the caller's loop. Without it the first call starts them
    on a private loop thread (`loop` says which kind), where they stay until `shutdown()`.
    """

    def __init__(  # noqa: PLR0913 - the public API
        self,
        *,
        model: torch.nn.Module,
        tokenizer: Any,  # noqa: ANN401 - megatron's interface or Hugging Face's
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type | None = None,
        attention_backend: str = "auto",
        loop: Backend = "asyncio",
    ) -> None:
        """Checks every argument; the engine starts at `async with` or at the first call.

        Raises: ValueError and TypeError naming argument, value and remedy; UnsupportedModelError.
        """
        self._parts = build(
            model=model,
            tokenizer=tokenizer,
            inference_config=inference_config,
            use_coordinator=use_coordinator,
            coordinator_host=coordinator_host,
            coordinator_port=coordinator_port,
            inference_wrapper_cls=inference_wrapper_cls,
            attention_backend=attention_backend,
        )
        self._use_coordinator = use_coordinator
        self._backend: Backend = loop
        self._tasks: TaskGroup | None = None
        self._host: EngineHost | None = None

    @property
    def engine(self) -> Engine:
        """The engine behind it; `engine.stats()` is readable from any thread."""
        return self._parts.engine

    def stats(self) -> EngineStats:
        """Gives the engine's figures after its last step."""
        return self._parts.engine.stats()

    async def __aenter__(self) -> Self:
        """Starts the engine in the running loop.

        Raises: what the start raised; RuntimeError when it runs already.
        """
        if self._tasks is not None or self._host is not None:
            raise RuntimeError("this MegatronAsyncLLM runs already; enter it once, before the first call")
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        try:
            await tasks.start(self._parts.engine.run)
        except BaseException as error:
            await tasks.__aexit__(type(error), error, error.__traceback__)
            raise
        self._tasks = tasks
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shuts down; never suppresses."""
        assert self._tasks is not None
        with anyio.move_on_after(STOP_S, shield=True):
            await self._parts.engine.shutdown()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def generate(
        self, prompts: Any, sampling_params: Any = None, multi_modal_data: Any = None  # noqa: ANN401 - checked below
    ) -> Result | list[Result]:
        """Runs one prompt or a batch and waits for the output.

        `prompts`: `str` or `list[int]` is one prompt and gives one result; `list[str]` or
        `list[list[int]]` is a batch and gives a list, in order. `sampling_params`: one for all, or a
        list of one a prompt. A prompt that can't run is a result whose `failed()` is true. A cancel
        aborts the requests; their blocks are free by the next step.

        Raises: TypeError, ValueError, NotImplementedError for the call as a whole, before anything
        runs; EngineBusy, EngineStoppedError, EngineDeadError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        call = await self._prepare(prompts, params, multi_modal_data)
        outcome = await self._in_engine_loop(run_to_completion, self._parts.engine, call.requests, None)
        results = results_of(call, outcome, self._parts.tokenizer)
        return results[0] if call.is_single else results

    def stream(
        self, prompt: Any, sampling_params: Any = None, multi_modal_data: Any = None  # noqa: ANN401 - checked below
    ) -> AsyncStream:
        """Gives one prompt's output as it comes: an async iterator of `Delta`.

        The request starts with the first `__anext__`. Leaving the stream early, by break, error,
        cancel, `aclose` or garbage collection, aborts it. Deltas that a slow reader has not taken
        are joined.

        Raises: TypeError, ValueError, NotImplementedError and InvalidRequestError, at the call; from
        the iterator EngineBusy, EngineStoppedError, EngineDeadError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        call = self._parts.intake.prepare(one_prompt(prompt), params, multi_modal_data, is_streamed=True)
        return AsyncStream(StreamState(self._parts.engine, call), self._in_engine_loop)

    async def shutdown(self) -> None:
        """Stops the engine and gives the model back; pending calls end with EngineStoppedError. Idempotent."""
        if self._host is not None:
            await anyio.to_thread.run_sync(self._host.close)
        elif self._tasks is not None:
            await self._parts.engine.shutdown()

    async def _prepare(self, prompts: object, params: object, multi_modal_data: object) -> Call:
        """Checks and tokenises, off the loop when that takes long."""
        prepare = self._parts.intake.prepare
        if isinstance(prompts, list | str) and _num_characters(prompts) > LONG_CALL:
            return await anyio.to_thread.run_sync(prepare, prompts, params, multi_modal_data)
        return prepare(prompts, params, multi_modal_data)

    async def _in_engine_loop[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> T:
        if self._tasks is not None:
            return await function(*args)
        if self._host is None:
            self._host = EngineHost(self._parts.engine, self._backend)
            self._host.close_with(self)
        return await wait_for(self._host.submit(function, *args))


def _num_characters(prompts: list[object] | str) -> int:
    return len(prompts) if isinstance(prompts, str) else sum(len(p) for p in prompts if isinstance(p, str))
