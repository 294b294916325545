"""What MegatronLLM and MegatronAsyncLLM have in common: construction, properties, the mode's rules."""

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams
from torch import distributed

from megallm.core_async.builder import Parts
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.generation import Outcome, results_of
from megallm.core_async.intake import Call
from megallm.core_async.plan.prompts import Prompts, one_prompt
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.structured import FIELDS
from megallm.core_async.tokenizers import TokenizerAdapter

if TYPE_CHECKING:
    from megallm.http.running import RunningServer, Submit
    from megallm.http.serve_config import ServeConfig

type Params = MegatronSamplingParams | list[MegatronSamplingParams] | list[SamplingParams] | None
"""One for all prompts, or one for each; megatron-core's own class or ours. None: the defaults."""

LONG_CALL = 20_000
"""Characters of prompts from which on they are tokenised off the loop."""


def scoring_params(top_n_logprobs: int) -> SamplingParams:
    """Gives the parameters that make a request of a text's log-probs alone."""
    return SamplingParams(
        temperature=0.0, num_tokens_to_generate=0, return_log_probs=True, top_n_logprobs=top_n_logprobs
    )


def takes_long(prompts: Prompts, sampling_params: Params) -> bool:
    """Whether a call is to be checked and tokenised off the loop: long texts, or a grammar to compile."""
    num_characters = (
        len(prompts)
        if isinstance(prompts, str)
        else sum(len(each) for each in prompts if isinstance(each, str))
    )
    given = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    has_grammar = any(getattr(params, field, None) is not None for params in given for field in FIELDS)
    return has_grammar or num_characters > LONG_CALL


def loaded(  # Any: a tokenizer of either interface
    model: torch.nn.Module | str | Path, tokenizer: Any
) -> tuple[torch.nn.Module, Any]:
    """Gives a model and its tokenizer: of a name or path, what `load_model` gives.

    `tokenizer`: with a name or path one of its own, or where to take it from; None is the checkpoint's.

    Raises: TypeError for a module without a tokenizer; as `load_model`.
    """
    if isinstance(model, str | Path):
        from megallm.models import load_model  # noqa: PLC0415 - above this floor, and of no use to most

        return load_model(model, tokenizer=tokenizer)
    if tokenizer is None:
        raise TypeError("tokenizer is None and model is a module; give the tokenizer that belongs to it")
    return model, tokenizer


class LLMBase:
    """The parts of one engine and the rules of its mode; starts nothing."""

    def __init__(self, parts: Parts, *, use_coordinator: bool) -> None:
        self._parts = parts
        self._use_coordinator = use_coordinator

    _servers: "tuple[RunningServer, ...]" = ()
    """Those that were started, the oldest first."""

    @property
    def engine(self) -> Engine:
        """The engine; `engine.stats()` is readable from any thread."""
        return self._parts.engine

    @property
    def context(self) -> "ContextView":
        """The engine's limits and counts, by megatron-core's names."""
        return ContextView(self._parts.engine)

    @property
    def controller(self) -> "ControllerView":
        """The tokenizer, by megatron-core's name."""
        return ControllerView(self._parts.tokenizer)

    @property
    def is_primary_rank(self) -> bool:
        """Whether this process may call `generate`: with a coordinator global rank 0, else every rank."""
        return not self._use_coordinator or not self._parts.calls.follows

    def _call(
        self,
        prompts: object,
        sampling_params: object,
        multi_modal_data: object,
        *,
        is_streamed: bool = False,
        reports_progress: bool = False,
    ) -> Call:
        """Checks and tokenises what `generate` or `stream` was called with."""
        self._require_primary()
        return self._parts.intake.prepare(
            one_prompt(prompts) if is_streamed else prompts,
            SamplingParams() if sampling_params is None else sampling_params,
            multi_modal_data,
            is_streamed=is_streamed,
            reports_progress=reports_progress,
        )

    def _results(self, call: Call, outcome: Outcome) -> list[Result]:
        """Gives one result a prompt, in the order of the call."""
        return results_of(call, outcome, self._parts.tokenizer)

    def _require_primary(self) -> None:
        if not self.is_primary_rank:
            rank = distributed.get_rank()
            raise RuntimeError(
                f"generate() runs on the primary rank in coordinator mode; this is global rank {rank}"
            )

    def _start_server(
        self, config: "ServeConfig", submit: "Submit", *, ends_with_engine: bool
    ) -> "RunningServer":
        """Starts a server in the engine's loop.

        Raises: ValueError in direct mode; TypeError; OSError when the port can't be had.
        """
        # the server stands on the floor above, and a program that never serves does not load it
        from megallm.http.running import start_server  # noqa: PLC0415

        if not self._use_coordinator:
            raise ValueError("serve() requires use_coordinator=True; this engine is in direct mode")
        parts = self._parts
        server = start_server(
            parts.engine,
            parts.tokenizer,
            config,
            parts.intake.matchers,
            submit,
            ends_with_engine=ends_with_engine,
        )
        self._servers = (*self._servers, server)
        return server

    async def _close_servers(self) -> None:
        for server in self._servers:
            await server.aclose()

    def _require_coordinator(self, call: str, *, unused: Coroutine[Any, Any, object] | None = None) -> None:
        if not self._use_coordinator:
            if unused is not None:
                unused.close()
            raise RuntimeError(f"{call}() requires use_coordinator=True; this engine is in direct mode")


class ContextView:
    """Limits and counts of an engine, read-only, by the names of megatron-core's DynamicInferenceContext."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def config(self) -> EngineConfig:
        """All limits of the engine."""
        return self._engine.config

    @property
    def max_tokens(self) -> int:
        """Tokens computed in one step at most."""
        return self._engine.config.max_tokens

    @property
    def max_requests(self) -> int:
        """Requests that run at once at most."""
        return self._engine.config.max_requests

    @property
    def max_sequence_length(self) -> int:
        """Prompt and output of one request at most."""
        return self._engine.config.max_sequence_length

    @property
    def block_size_tokens(self) -> int:
        """Tokens of one block of the cache."""
        return self._engine.config.block_size

    @property
    def step_count(self) -> int:
        """Steps run so far."""
        return self._engine.stats().step

    @property
    def total_request_count(self) -> int:
        """Requests that run now."""
        return self._engine.stats().running

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Tokens of prompts, and of preempted requests, computed so far."""
        return self._engine.stats().prefill_tokens


class ControllerView:
    """The text side of an engine under the name of megatron-core's TextGenerationController."""

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        self.tokenizer = tokenizer.wrapped
        """The tokenizer that the engine was given."""
