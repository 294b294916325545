"""MegatronAsyncLLM: the engine for programs that have an event loop, trio's or asyncio's."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import torch
from anyio.abc import TaskGroup
from megatron.core.inference.config import InferenceConfig

from megallm.core_async.builder import build
from megallm.core_async.config import check_epoch
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.facade import LLMBase, Params, loaded, scoring_params, takes_long
from megallm.core_async.generation import Drafts, run_to_completion
from megallm.core_async.host import EngineHost
from megallm.core_async.intake import Call
from megallm.core_async.kit.call_queue import CallQueue
from megallm.core_async.loop_thread import Backend
from megallm.core_async.plan.prompts import Prompt, Prompts
from megallm.core_async.result import Result
from megallm.core_async.streaming import AsyncStream, StreamState

if TYPE_CHECKING:
    from megallm.http.running import RunningServer
    from megallm.http.serve_config import ServeConfig

STOP_S = 15.0
"""How long leaving the block waits for the engine's stop, also when it is cancelled."""


class MegatronAsyncLLM(LLMBase):
    """Generates with a megatron-core model, natively in the caller's event loop.

    `async with` runs the engine's tasks in the caller's loop. Without it the first call starts them
    on a private loop thread (`loop` says which kind), where they stay until `shutdown()`.
    """

    def __init__(  # the public API
        self,
        *,
        model: torch.nn.Module | str | Path,
        tokenizer: Any = None,  # megatron's interface or Hugging Face's
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type | None = None,
        attention_backend: str = "auto",
        loop: Backend = "asyncio",
        batch_invariant: bool = False,
    ) -> None:
        """Checks every argument; the engine starts at `async with` or at the first call.

        Raises: ValueError and TypeError naming argument, value and remedy; UnsupportedModelError.
        """
        module, its_tokenizer = loaded(model, tokenizer)
        parts = build(
            model=module,
            tokenizer=its_tokenizer,
            inference_config=inference_config,
            use_coordinator=use_coordinator,
            coordinator_host=coordinator_host,
            coordinator_port=coordinator_port,
            inference_wrapper_cls=inference_wrapper_cls,
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
        )
        super().__init__(parts, use_coordinator=use_coordinator)
        self._backend: Backend = loop
        self._tasks: TaskGroup | None = None
        self._calls: CallQueue | None = None
        self._host: EngineHost | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Starts the engine in the running loop.

        Raises: what the start raised; RuntimeError when it runs already.
        """
        if self._tasks is not None or self._host is not None:
            raise RuntimeError("this MegatronAsyncLLM runs already; enter it once, before the first call")
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        try:
            self._calls = CallQueue()
            await tasks.start(self._calls.serve)
            await tasks.start(self._parts.engine.run)
        except BaseException:
            self._calls = None
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)  # given the error, it would raise it in a group
            raise
        self._tasks = tasks
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shuts down; never suppresses."""
        assert self._tasks is not None
        try:
            await self._close_servers()
            if exc_type is None:
                await self._parts.calls.wait_for_leader()
        finally:
            with anyio.move_on_after(STOP_S, shield=True):
                await self._parts.engine.shutdown()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        multi_modal_data: object = None,
    ) -> Result | list[Result]:
        """Runs one prompt or a batch and waits for the output.

        `prompts`: `str` or `list[int]` is one prompt and gives one result; `list[str]` or
        `list[list[int]]` is a batch and gives a list, in order. `sampling_params`: one for all, or a
        list of one a prompt. A prompt that can't run is a result whose `failed()` is true. A cancel
        aborts the requests; their blocks are free by the next step.

        Raises: TypeError, ValueError, NotImplementedError for the call as a whole, before anything
        runs; EngineBusy, EngineStoppedError, EngineDeadError.
        """
        call = await self._prepare(prompts, sampling_params, multi_modal_data)
        drafts = Drafts(call, self._parts.tokenizer)
        outcome = await self._in_engine_loop(
            run_to_completion, self._parts.engine, call.requests, None, drafts
        )
        results = self._results(call, outcome)
        return results[0] if call.is_single else results

    async def score(self, prompts: Prompts, *, top_n_logprobs: int = 0) -> Result | list[Result]:
        """Gives the log-probabilities of texts under the model, in one pass: nothing is generated.

        One result a prompt, whose `prompt_log_probs` has one entry for each token after the first,
        and `prompt_top_n_logprobs` the likeliest rivals where `top_n_logprobs` asks for them.
        Raises: as `generate`.
        """
        return await self.generate(prompts, scoring_params(top_n_logprobs))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        multi_modal_data: object = None,
    ) -> AsyncStream:
        """Gives one prompt's output as it comes: an async iterator of `Delta`.

        The request starts with the first `__anext__`. Leaving the stream early, by break, error,
        cancel, `aclose` or garbage collection, aborts it. Deltas that a slow reader has not taken
        are joined.

        Raises: TypeError, ValueError, NotImplementedError and InvalidRequestError, at the call; from
        the iterator EngineBusy, EngineStoppedError, EngineDeadError.
        """
        call = self._call(prompt, sampling_params, multi_modal_data, is_streamed=True)
        return AsyncStream(StreamState(self._parts.engine, call), self._in_engine_loop)

    # ---- lifecycle, in coordinator mode --------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """Comes to rest after the step in flight; requests are kept, and new ones queue.

        `mode`: "keep" freezes the requests, "wait" lets those in flight finish first, "abort" ends
        them with what they have.
        Raises: RuntimeError in direct mode; ValueError; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("pause")
        await self._in_engine_loop(self._parts.calls.pause, mode)

    async def unpause(self) -> None:
        """Goes on from a pause.

        Raises: RuntimeError in direct mode; LifecycleError when suspended (resume first);
        EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("unpause")
        await self._in_engine_loop(self._parts.calls.unpause)

    async def suspend(self) -> None:
        """Pauses if need be, and gives the cache's memory back as `kv_cache_management_mode` says.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("suspend")
        await self._in_engine_loop(self._parts.calls.suspend)

    async def resume(self) -> None:
        """Takes the cache's memory again; the engine is paused then, and `unpause()` runs it.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("resume")
        await self._in_engine_loop(self._parts.calls.resume)

    async def set_generation_epoch(self, epoch: int) -> None:
        """Stamps results with the number of the weights that they come from, from now on.

        Raises: ValueError; EngineStoppedError, EngineDeadError.
        """
        await self._in_engine_loop(self._parts.calls.set_generation_epoch, epoch)

    @contextlib.asynccontextmanager
    async def updating_weights(self, epoch: int) -> AsyncGenerator[None]:
        """Holds the engine suspended while the block changes the model's weights in place.

        Pauses and suspends before the block; sets the epoch, resumes and unpauses after it. When
        the block raises, the engine runs on with the epoch it had.
        Raises: as the calls it makes.
        """
        self._require_coordinator("updating_weights")
        check_epoch(epoch)
        try:
            await self.suspend()
            yield
            await self.set_generation_epoch(epoch)
        except Exception:
            await self.resume()
            await self.unpause()
            raise
        except BaseException:  # a cancel waits for nothing, not even for a suspend that it cut short
            self._parts.engine.post(self._parts.engine.go_on)
            raise
        await self.resume()
        await self.unpause()

    async def serve(self, serve_config: "ServeConfig", *, blocking: bool = True) -> "RunningServer | None":
        """Serves the OpenAI API over HTTP; see MegatronLLM. What it gives has `aclose` beside `stop`.

        A cancel stops the server at once. Raises: as MegatronLLM's.
        """
        if not self.is_primary_rank:
            if blocking:
                await self.wait_for_shutdown()
            return None
        submit = self._started_host().submit if self._calls is None else self._calls.submit
        server = self._start_server(serve_config, submit, ends_with_engine=blocking)
        if not blocking:
            await server.started()
            return server
        with server.stopping_on_signals():
            await server.wait_closed()
        return None

    async def shutdown(self) -> None:
        """Stops the servers and the engine, and gives the model back; idempotent.

        Pending calls end with EngineStoppedError. On a rank that follows another it waits until that
        one has shut down.
        """
        self._is_closed = True
        await self._close_servers()
        if self._parts.calls.follows and (self._tasks is not None or self._host is not None):
            with contextlib.suppress(EngineStoppedError, EngineDeadError):
                await self._in_engine_loop(self._parts.calls.wait_for_leader)
        if self._tasks is not None:
            await self._parts.engine.shutdown()
        elif self._host is not None:
            self._finalizer.detach()
            if self._host.is_current:
                await self._parts.engine.shutdown()
                self._host.close()
            else:
                await anyio.to_thread.run_sync(self._host.close)

    async def wait_for_shutdown(self) -> None:
        """Waits until the engine has stopped, whoever stops it; in direct mode returns at once.

        Raises: EngineDeadError when it failed.
        """
        if not self._use_coordinator:
            return
        try:
            await self._in_engine_loop(self._parts.engine.wait_for_shutdown)
        except EngineStoppedError:
            return

    # ---- the engine's loop ---------------------------------------------------------------------

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the engine's loop; cancelling the future cancels it. From any thread.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("submit", unused=coroutine)
        if self._calls is None:
            return self._started_host().submit_coroutine(coroutine)
        try:
            return self._calls.submit(_awaited, coroutine)
        except RuntimeError as refusal:
            coroutine.close()
            error = self._parts.engine.error()
            raise error from error.__cause__ or refusal

    def run_sync[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and waits for it, from another thread.

        Raises: what it raised; RuntimeError in direct mode, and in the engine's loop itself;
        EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("run_sync", unused=coroutine)
        if self._calls is None:
            return self._started_host().run_coroutine(coroutine)
        if self._calls.is_current:
            coroutine.close()
            raise RuntimeError(
                "run_sync() was called in the engine's own loop, which would wait for itself; await it"
            )
        try:
            return self.submit(coroutine).result()
        except CancelledError as cancelled:
            error = self._parts.engine.error()
            raise error from error.__cause__ or cancelled

    async def _prepare(self, prompts: Prompts, sampling_params: Params, multi_modal_data: object) -> Call:
        """Checks and tokenises, off the loop when that takes long."""
        if takes_long(prompts, sampling_params):
            return await anyio.to_thread.run_sync(self._call, prompts, sampling_params, multi_modal_data)
        return self._call(prompts, sampling_params, multi_modal_data)

    async def _in_engine_loop[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> T:
        if self._tasks is not None:
            return await function(*args)
        return await self._started_host().call_from_loop(function, *args)

    def _started_host(self) -> EngineHost:
        """Gives the private loop's host, which the first call starts.

        Raises: EngineStoppedError after `shutdown`.
        """
        if self._host is None:
            if self._is_closed:
                raise EngineStoppedError("the engine was shut down")
            self._host = EngineHost(self._parts.engine, self._backend)
            self._finalizer = self._host.close_with(self)
        return self._host


async def _awaited[T](coroutine: Coroutine[Any, Any, T]) -> T:
    return await coroutine
