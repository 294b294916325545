"""MegatronLLM: the engine for plain scripts. Blocks; `generate` always returns a list."""

import contextlib
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from megatron.core.inference.config import InferenceConfig

from megallm.core_async.builder import build
from megallm.core_async.engine import Engine
from megallm.core_async.generation import results_of, run_to_completion
from megallm.core_async.host import EngineHost
from megallm.core_async.intake import one_prompt
from megallm.core_async.loop_thread import Backend
from megallm.core_async.messages import EngineStats
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.streaming import StreamState
from megallm.sync.progress import ProgressBar, wants_bar
from megallm.sync.streaming import SyncStream


class MegatronLLM:
    """Generates with a megatron-core model, over an engine on a private loop thread.

    Several threads may call it at once: their requests batch together. Works inside a running
    event loop too, which stalls meanwhile.
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
        """Checks every argument and starts the engine; on failure nothing is left running.

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
        self._host = EngineHost(self._parts.engine, loop)
        self._finalizer: weakref.finalize[..., object] = self._host.close_with(self)

    @property
    def engine(self) -> Engine:
        """The engine behind it; `engine.stats()` is readable from any thread."""
        return self._parts.engine

    def stats(self) -> EngineStats:
        """Gives the engine's figures after its last step."""
        return self._parts.engine.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shuts down; never suppresses."""
        self.shutdown()

    def generate(
        self,
        prompts: Any,  # noqa: ANN401 - checked below
        sampling_params: Any = None,  # noqa: ANN401
        multi_modal_data: Any = None,  # noqa: ANN401
        *,
        progress: bool | None = None,
    ) -> list[Result]:
        """Runs one prompt or a batch, waits, and gives one result a prompt, in order: always a list.

        `prompts`: `str` or `list[int]` is one prompt, `list[str]` or `list[list[int]]` a batch.
        `sampling_params`: one for all, or a list of one a prompt. `progress`: a bar on stderr; None
        shows it for more than one prompt on a terminal. A prompt that can't run is a result whose
        `failed()` is true. Ctrl-C aborts the call's requests and leaves the engine usable.

        Raises: TypeError, ValueError, NotImplementedError for the call as a whole, before anything
        runs; EngineBusy, EngineStoppedError, EngineDeadError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        num_prompts = len(prompts) if isinstance(prompts, list) else 1
        shows_bar = wants_bar(progress, num_prompts)
        call = self._parts.intake.prepare(prompts, params, multi_modal_data, reports_progress=shows_bar)
        with contextlib.closing(ProgressBar(call)) if shows_bar else contextlib.nullcontext() as bar:
            outcome = self._host.call(run_to_completion, self._parts.engine, call.requests, bar)
        return results_of(call, outcome, self._parts.tokenizer)

    def stream(
        self, prompt: Any, sampling_params: Any = None, multi_modal_data: Any = None  # noqa: ANN401 - checked below
    ) -> SyncStream:
        """Gives one prompt's output as it comes: an iterator of `Delta`.

        The request starts with the first `next`. Leaving the stream early, by break, error, Ctrl-C,
        `close` or garbage collection, aborts it. Deltas that a slow reader has not taken are joined.

        Raises: TypeError, ValueError, NotImplementedError and InvalidRequestError, at the call; from
        the iterator EngineBusy, EngineStoppedError, EngineDeadError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        call = self._parts.intake.prepare(one_prompt(prompt), params, multi_modal_data, is_streamed=True)
        return SyncStream(StreamState(self._parts.engine, call), self._host)

    def shutdown(self) -> None:
        """Stops the engine, joins its thread and gives the model back; idempotent.

        Pending calls of other threads end with EngineStoppedError.
        """
        self._finalizer.detach()
        self._host.close()
