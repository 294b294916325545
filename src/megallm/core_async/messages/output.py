"""What comes out of a step: to the detokeniser, to readers, to whoever looks at the engine."""

from msgspec import Struct

from megallm.core_async.messages.columns import Floats, Ints, RequestId
from megallm.core_async.messages.request import TextSpec
from megallm.core_async.messages.step import StepPlan, TopLogProbs


class Finished(Struct, frozen=True, gc=False):
    """A request ended: why, as the engine decided it."""

    request_id: RequestId
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The token id or the stop word that ended it."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    events: tuple[tuple[str, float], ...] = ()
    """(what, loop time): "add_context" for each admission, "evict", and "pause" for each time it sits out."""
    policy_epoch: tuple[tuple[int, int], ...] | None = None
    """(place in the tokens from which on it holds, number of the weights); None before the first SetEpoch."""
    kv_cache_epoch: tuple[tuple[int, int], ...] | None = None


class ScoredChunk(Struct, frozen=True, gc=False):
    """Log-probs of the next tokens of one request's prompt."""

    request_id: RequestId
    log_probs: Floats
    top: TopLogProbs | None


class TokenBatch(Struct, frozen=True, gc=False):
    """One step's new tokens, and the requests that ended with it."""

    started: list[TextSpec]
    """Requests that the detokeniser has not heard of before."""
    requests: list[RequestId]
    tokens: Ints
    log_probs: Floats
    finished: list[Finished]
    time_s: float
    """Loop time at which the step's result arrived."""
    top: TopLogProbs | None = None
    """One place for each of `tokens`."""
    scored: list[ScoredChunk] = []


class StepSplit(Struct, frozen=True, gc=False):
    """Seconds that the parts of a step took; plan and post overlap the forward pass of another step."""

    plan_s: float = 0.0
    """The scheduler's answer."""
    prepare_s: float = 0.0
    """On the rank's thread, as are the next two."""
    forward_s: float = 0.0
    sample_s: float = 0.0
    post_s: float = 0.0
    """The detokeniser."""


class EngineStats(Struct, frozen=True, gc=False):
    """The engine after a step, as its scheduler saw it. Sums are since the start."""

    step: int = 0
    """Steps planned so far."""
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    prefix_hit_rate: float = 0.0
    """`prefix_hit_tokens` of `prefix_query_tokens`."""
    preemptions: int = 0
    prefill_tokens: int = 0
    """Tokens computed other than one by one."""
    prefix_query_tokens: int = 0
    """Tokens of the admitted requests whose prefix was looked up."""
    prefix_hit_tokens: int = 0
    """Those of them that were cached."""
    generated_tokens: int = 0
    """Tokens that came with the results so far."""
    captured_steps: int = 0
    """Steps that were replayed from a captured graph."""
    last_step: StepSplit = StepSplit()
    """Of each part the last: they belong to different steps, since steps overlap."""
    all_steps: StepSplit = StepSplit()
    """Sums."""


class Planned(Struct, frozen=True, gc=False):
    """The reply to NextStep: what to run next, and what the last result meant."""

    plan: StepPlan | None
    batch: TokenBatch | None
    stats: EngineStats


class Delta(Struct, frozen=True, gc=False):
    """What a stream got since the delta before: text, tokens, and at the last why it ended."""

    text: str
    token_ids: list[int]
    log_probs: list[float] | None = None
    top_n_logprobs: list[dict[str, float]] | None = None
    finish_reason: str | None = None
    """None until the last delta."""
    stop_reason: int | str | None = None
    request_id: RequestId = RequestId(0)
    top: list[list[tuple[int, float]]] | None = None
    """As `top_n_logprobs`, by token id: (token id, log-prob), the likeliest first."""
    prompt_log_probs: list[float] | None = None
    """In the first delta, where the prompt is scored: one for each prompt token after the first."""
    prompt_top: list[list[tuple[int, float]]] | None = None
    ending: Finished | None = None
    """In the last delta: all that the engine recorded of the request."""


class Progress(Struct, frozen=True, gc=False):
    """How many new tokens a step gave to the requests of one outbox."""

    num_tokens: int


class Completion(Struct, frozen=True, gc=False):
    """A request's whole output, once it ended."""

    request_id: RequestId
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    num_cached_tokens: int
    first_token_s: float | None
    """Loop time of the first token."""
    last_token_s: float | None
    log_probs: list[float] | None = None
    """One a token, where the request asked."""
    top: list[list[tuple[int, float]]] | None = None
    """(token id, log-prob) of the likeliest tokens at each, the likeliest first."""
    prompt_log_probs: list[float] | None = None
    """One for each prompt token after the first."""
    prompt_top: list[list[tuple[int, float]]] | None = None
    num_preemptions: int = 0
    events: tuple[tuple[str, float], ...] = ()
    """See Finished."""
    token_times: list[float] | None = None
    """Loop time of each token, where the request tracks them."""
    policy_epoch: tuple[tuple[int, int], ...] | None = None
    kv_cache_epoch: tuple[tuple[int, int], ...] | None = None
