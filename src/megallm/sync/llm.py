"""MegatronLLM: the engine for plain scripts. Blocks; `generate` always returns a list."""

import contextlib
import weakref
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from megatron.core.inference.config import InferenceConfig

from megallm.core_async.builder import build
from megallm.core_async.config import check_epoch
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.facade import LLMBase, Params, loaded, scoring_params
from megallm.core_async.generation import Drafts, run_to_completion
from megallm.core_async.host import EngineHost
from megallm.core_async.loop_thread import Backend
from megallm.core_async.plan.prompts import Prompt, Prompts
from megallm.core_async.result import Result
from megallm.core_async.streaming import StreamState
from megallm.sync.progress import ProgressBar, wants_bar
from megallm.sync.streaming import SyncStream

if TYPE_CHECKING:
    from megallm.http.running import RunningServer
    from megallm.http.serve_config import ServeConfig


class MegatronLLM(LLMBase):
    """Generates with a megatron-core model, over an engine on a private loop thread.

    Several threads may call it at once: their requests batch together. Works inside a running
    event loop too, which stalls meanwhile.
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
        """Checks every argument and starts the engine; on failure nothing is left running.

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
        self._host = EngineHost(self._parts.engine, loop)
        self._finalizer: weakref.finalize[..., object] = self._host.close_with(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shuts down, after an error at once; never suppresses."""
        if exc_type is None:
            self.shutdown()
        else:
            self._close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        multi_modal_data: object = None,
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
        num_prompts = len(prompts) if isinstance(prompts, list) else 1
        shows_bar = wants_bar(num_prompts, progress=progress)
        call = self._call(prompts, sampling_params, multi_modal_data, reports_progress=shows_bar)
        with contextlib.closing(ProgressBar(call)) if shows_bar else contextlib.nullcontext() as bar:
            drafts = Drafts(call, self._parts.tokenizer)
            outcome = self._host.call(run_to_completion, self._parts.engine, call.requests, bar, drafts)
        return self._results(call, outcome)

    def score(self, prompts: Prompts, *, top_n_logprobs: int = 0) -> list[Result]:
        """Gives the log-probabilities of texts under the model, in one pass: nothing is generated.

        One result a prompt, whose `prompt_log_probs` has one entry for each token after the first,
        and `prompt_top_n_logprobs` the likeliest rivals where `top_n_logprobs` asks for them.
        Raises: as `generate`.
        """
        return self.generate(prompts, scoring_params(top_n_logprobs), progress=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        multi_modal_data: object = None,
    ) -> SyncStream:
        """Gives one prompt's output as it comes: an iterator of `Delta`.

        The request starts with the first `next`. Leaving the stream early, by break, error, Ctrl-C,
        `close` or garbage collection, aborts it. Deltas that a slow reader has not taken are joined.

        Raises: TypeError, ValueError, NotImplementedError and InvalidRequestError, at the call; from
        the iterator EngineBusy, EngineStoppedError, EngineDeadError.
        """
        call = self._call(prompt, sampling_params, multi_modal_data, is_streamed=True)
        return SyncStream(StreamState(self._parts.engine, call), self._host)

    # ---- lifecycle, in coordinator mode --------------------------------------------------------

    def pause(self, mode: str = "keep") -> None:
        """Comes to rest after the step in flight; requests are kept, and new ones queue.

        `mode`: "keep" freezes the requests, "wait" lets those in flight finish first, "abort" ends
        them with what they have.
        Raises: RuntimeError in direct mode; ValueError; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("pause")
        self._host.call(self._parts.calls.pause, mode)

    def unpause(self) -> None:
        """Goes on from a pause.

        Raises: RuntimeError in direct mode; LifecycleError when suspended (resume first);
        EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("unpause")
        self._host.call(self._parts.calls.unpause)

    def suspend(self) -> None:
        """Pauses if need be, and gives the cache's memory back as `kv_cache_management_mode` says.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("suspend")
        self._host.call(self._parts.calls.suspend)

    def resume(self) -> None:
        """Takes the cache's memory again; the engine is paused then, and `unpause()` runs it.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("resume")
        self._host.call(self._parts.calls.resume)

    def set_generation_epoch(self, epoch: int) -> None:
        """Stamps results with the number of the weights that they come from, from now on.

        Raises: ValueError; EngineStoppedError, EngineDeadError.
        """
        self._host.call(self._parts.calls.set_generation_epoch, epoch)

    @contextlib.contextmanager
    def updating_weights(self, epoch: int) -> Generator[None]:
        """Holds the engine suspended while the block changes the model's weights in place.

        Pauses and suspends before the block; sets the epoch, resumes and unpauses after it. When
        the block raises, the engine runs on with the epoch it had.
        Raises: as the calls it makes.
        """
        self._require_coordinator("updating_weights")
        check_epoch(epoch)
        try:
            self.suspend()
            yield
            self.set_generation_epoch(epoch)
        except Exception:
            self.resume()
            self.unpause()
            raise
        except BaseException:  # Ctrl-C waits for nothing, not even for a suspend that it cut short
            self._parts.engine.post(self._parts.engine.go_on)
            raise
        self.resume()
        self.unpause()

    def serve(self, serve_config: "ServeConfig", *, blocking: bool = True) -> "RunningServer | None":
        """Serves the OpenAI API over HTTP; on ranks other than the primary one it serves nothing.

        `blocking`: until SIGINT or SIGTERM; what is under way then has `drain_timeout_s` to finish,
        and the engine runs on. Otherwise returns once the port answers; the server stops with
        `shutdown`, or with `stop` of what this gives.

        Raises: ValueError in direct mode; OSError when the port can't be had; FrontendFailedError;
        where it blocks, EngineDeadError when the engine fails.
        """
        if not self.is_primary_rank:
            if blocking:
                self.wait_for_shutdown()
            return None
        server = self._start_server(serve_config, self._host.submit, ends_with_engine=blocking)
        if not blocking:
            server.wait_started()
            return server
        with server.stopping_on_signals():
            server.wait()
        return None

    def shutdown(self) -> None:
        """Stops the servers, the engine and its thread, and gives the model back; idempotent.

        Pending calls of other threads end with EngineStoppedError. On a rank that follows another it
        waits until that one has shut down.
        """
        if self._parts.calls.follows and not self._host.is_current:
            with contextlib.suppress(EngineStoppedError, EngineDeadError):
                self._host.call(self._parts.calls.wait_for_leader)
        self._close()

    def _close(self) -> None:
        self._finalizer.detach()
        for server in self._servers:
            server.stop()
        self._host.close()

    def wait_for_shutdown(self) -> None:
        """Blocks until the engine has stopped, whoever stops it; in direct mode returns at once.

        Raises: EngineDeadError when it failed.
        """
        if self._use_coordinator:
            self._host.wait_for_shutdown()

    # ---- the private loop ----------------------------------------------------------------------

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the engine's loop; cancelling the future cancels it.

        Raises: RuntimeError in direct mode; EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("submit", unused=coroutine)
        return self._host.submit_coroutine(coroutine)

    def run_sync[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and waits for it.

        Raises: what it raised; RuntimeError in direct mode, and in the engine's loop itself;
        EngineStoppedError, EngineDeadError.
        """
        self._require_coordinator("run_sync", unused=coroutine)
        return self._host.run_coroutine(coroutine)
