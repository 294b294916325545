"""Every Struct that crosses a mailbox or a process: ids, numbers, bytes, and lists of them.

Asks are imperatives, tells are past events, values are nouns. On the step path rows travel as
parallel columns (`Ints`), not as lists of Structs. Knows no actor, no tensor, no loop.
"""

from array import array
from typing import NewType

from msgspec import Struct

RequestId = NewType("RequestId", int)
Row = NewType("Row", int)
"""A place in the batch: index into the per-request state that every rank keeps, 0 .. max_requests - 1."""
BlockId = NewType("BlockId", int)

Ints = NewType("Ints", bytes)
"""A column of int32, machine byte order (little-endian on every supported machine)."""
Floats = NewType("Floats", bytes)
"""A column of float32, machine byte order."""


def pack_ints(values: list[int] | array[int]) -> Ints:
    """Gives the column of int32 that holds `values`."""
    return Ints(array("i", values).tobytes())


def unpack_ints(column: Ints) -> array[int]:
    """Gives the numbers of a column; iterates as Python ints."""
    values = array("i")
    values.frombytes(column)
    return values


def pack_floats(values: list[float]) -> Floats:
    """Gives the column of float32 that holds `values`."""
    return Floats(array("f", values).tobytes())


def unpack_floats(column: Floats) -> array[float]:
    """Gives the numbers of a column; iterates as Python floats."""
    values = array("f")
    values.frombytes(column)
    return values


class Ask[R](Struct, frozen=True):
    """A message that expects one reply of type R."""


# ---- what a request is -------------------------------------------------------------------------


class Sampling(Struct, frozen=True, gc=False):
    """How one request's tokens are chosen: resolved and checked numbers, never None."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 0.0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    seed: int = 0
    """0 .. 2**63 - 1. With the position of the token it fixes the random number that is drawn."""
    wants_log_probs: bool = False
    """Ask for the log-probability of each chosen token."""
    num_top: int = 0
    """With `wants_log_probs`: how many of the likeliest tokens to report beside the chosen one."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token generated before; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit once for each time the token was generated; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of prompt and output; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    grammar: str = ""
    """What the output has to match, as llguidance's grammar in JSON; empty is anything."""

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on the earlier ones other than through the model."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.grammar
        )


class NewRequest(Struct, frozen=True, gc=False):
    """One prompt as the scheduler takes it: already checked against the engine's limits."""

    request_id: RequestId
    prompt: Ints
    max_new_tokens: int
    """Prompt and output together fit max_sequence_length; 0 only where `scores_prompt`."""
    stop_token_ids: tuple[int, ...]
    """Ids that end the request; the id itself is kept as the last generated token."""
    sampling: Sampling
    text: "TextSpec"
    min_new_tokens: int = 0
    """Stop ids are not sampled before so many tokens."""
    scores_prompt: bool = False
    """Report the log-probability of each prompt token after the first, and its likeliest rivals."""


class TextSpec(Struct, frozen=True, gc=False):
    """What the detokeniser does with one request's tokens."""

    request_id: RequestId
    stop_words: tuple[str, ...] = ()
    keep_stop: bool = False
    """Leave the stop word (and the end-of-sequence token) in the text."""
    is_streamed: bool = False
    """`Delta`s as tokens come, instead of one `Completion` at the end."""
    reports_progress: bool = False
    """`Progress` after each step, beside the completions."""
    wants_log_probs: bool = False
    num_top: int = 0
    """How many of the likeliest tokens to report at each place."""


# ---- to the scheduler --------------------------------------------------------------------------


class Submit(Ask[None], frozen=True, gc=False):
    """Queue these requests, in order; one message for a whole batch.

    Raises EngineBusy, queueing none of them, when the waiting list has no room for all.
    """

    requests: list[NewRequest]


class NextStep(Ask["Planned"], frozen=True, gc=False):
    """Apply the last result, drop the closed requests, and plan the next step."""

    result: "StepResult | None"
    closed: list[RequestId]
    """Requests whose readers left or whose text reached a stop word."""
    may_plan: bool = True
    """False while draining: only the result is applied."""


class PreemptAll(Ask[None], frozen=True):
    """Take every running request's blocks away; each recomputes its tokens when it runs again.

    Legal only while no step is in flight.
    """


class FinishAll(Ask["TokenBatch"], frozen=True):
    """End every request, running or waiting, with what it has; the batch says so to the detokeniser.

    Legal only while no step is in flight.
    """

    finish_reason: str


class HoldNew(Ask[None], frozen=True):
    """Keep requests that come from now on aside, until `AdmitHeld`; those here already run to their end."""


class AdmitHeld(Ask[None], frozen=True):
    """Queue the requests that were kept aside, and those that come."""


class SetEpoch(Ask[None], frozen=True):
    """Stamp what is generated from now on with the number of the weights it comes from."""

    epoch: int


# ---- to the lifecycle --------------------------------------------------------------------------


class Pause(Ask[None], frozen=True):
    """Come to rest; see plan/phases.py for the modes. Replies once no step is in flight."""

    mode: str = "keep"


class Unpause(Ask[None], frozen=True):
    """Go on."""


class Suspend(Ask[None], frozen=True):
    """Come to rest and give the cache's memory back, as the KV mode says."""


class Resume(Ask[None], frozen=True):
    """Take the cache's memory again; the engine is paused then."""


class PumpRested(Struct, frozen=True, gc=False):
    """The pump found nothing to plan and left no step in flight."""

    order: int
    """The gate's order that it went by: one given later it has not seen."""


# ---- to the allocator --------------------------------------------------------------------------


class ReserveBlocks(Ask["BlockGrant"], frozen=True, gc=False):
    """Give back what is released, then grant blocks from the top of the list.

    `rows` want room for `num_tokens` tokens each, counted from the row's first token; a row that
    has room may be left out. The first `num_running` of them are running, in the order of
    `victims`: short of blocks, the last of `victims` loses all of its own, then the one before it,
    until the row fits, the row itself last of all. So a row granted earlier is never taken from,
    and the first of `victims` can have every block of the pool. The rest are admissions to rows
    that hold nothing: they are granted only from blocks nobody holds, the first that does not fit
    ends the granting, and none is granted when a running row had to yield (it is the head of the
    queue now).
    """

    released: list[Row]
    rows: list[Row]
    num_tokens: list[int]
    num_running: int
    victims: list[Row]
    """All running rows, in order of precedence."""


class BlockGrant(Struct, frozen=True, gc=False):
    """What `ReserveBlocks` gave: columns of block-table changes, and who lost theirs."""

    num_admitted: int
    """How many of the admissions got their blocks, counted from the first."""
    preempted: list[Row]
    """A tail of `victims`, the last first; running `rows` that are not in it have what they wanted."""
    changed_rows: list[Row]
    changed_starts: list[int]
    """Index in the row's block table of its first new entry."""
    changed_counts: list[int]
    blocks: list[BlockId]
    """The new entries of all changed rows, one after the other."""
    num_free: int
    """Blocks that nobody holds, after all this."""


class BlockCounts(Struct, frozen=True, gc=False):
    """How the cache is used."""

    num_blocks: int
    num_free: int
    num_used: int


class CountBlocks(Ask[BlockCounts], frozen=True):
    """Say how many blocks are free and used."""


# ---- to the ranks ------------------------------------------------------------------------------


class RowSetup(Struct, frozen=True, gc=False):
    """A request takes a row: what the rank keeps for it until another takes the row."""

    row: Row
    sampling: Sampling
    num_prompt: int = 0
    """Tokens of the prompt; what follows them in the row's tokens was generated."""
    known: Ints = Ints(b"")
    """Prompt and output so far, where `sampling.needs_history`; else empty."""
    masked_ids: tuple[int, ...] = ()
    """Ids that are not sampled at positions below `masked_until`."""
    masked_until: int = 0


class StepPlan(Struct, frozen=True, gc=False):
    """One forward pass, the same for every rank: which tokens of which rows, and where they are cached.

    Rows are in batch order, the `num_decode` decode rows first: each of those computes one token,
    the one its row sampled last, whose id never left the device. The other rows compute
    `lengths[i]` tokens whose ids are in `tokens`, one row after the other.
    """

    step: int
    num_decode: int
    rows: Ints
    starts: Ints
    """Position of the row's first token in this step."""
    lengths: Ints
    """Tokens the row computes in this step, at least 1."""
    samples: bytes
    """One byte a row: 1 where the row's last token yields a new token."""
    tokens: Ints
    new_rows: list[RowSetup]
    """Applied before the step."""
    changed_rows: Ints
    """Block-table changes, applied before the step; see BlockGrant."""
    changed_starts: Ints
    changed_counts: Ints
    blocks: Ints
    scored: bytes = b""
    """One byte a row: 1 where the log-probs of the tokens after each computed one are wanted. Empty: nowhere."""
    targets: Ints = Ints(b"")
    """For each scored row `lengths[i]` ids: the token that follows each computed one, or -1 where
    its log-prob is not wanted."""


class TopLogProbs(Struct, frozen=True, gc=False):
    """The likeliest tokens at some places: rows of `num_top` ids and log-probs, the likeliest first."""

    num_top: int
    ids: Ints
    """`[places * num_top]`."""
    log_probs: Floats
    """float32, the same places; from the tensor that the chosen tokens' log-probs come from."""


class StepResult(Struct, frozen=True, gc=False):
    """What one step gave: a new token for each sampling row, in batch order."""

    step: int
    tokens: Ints
    log_probs: Floats = Floats(b"")
    """Log-probability of each token, float32, once any row asks; else empty."""
    top: TopLogProbs | None = None
    """One place for each sampling row, once any row asks; `num_top` is the most that any asks."""
    scores: Floats = Floats(b"")
    """Log-probability of each of the plan's targets, those of -1 left out."""
    score_top: TopLogProbs | None = None
    """The same places."""
    prepare_s: float = 0.0
    """Host seconds spent building the step's tensors."""
    forward_s: float = 0.0
    sample_s: float = 0.0


class LaunchStep(Struct, frozen=True, gc=False):
    """A plan was made: queue its work on the device."""

    plan: StepPlan


class CollectStep(Ask[StepResult], frozen=True):
    """Wait for the oldest step launched and give its result."""


class ReleaseCache(Ask[None], frozen=True):
    """Give the cache's device memory back."""

    keep_contents: bool
    """Move the contents to host memory; else they are lost."""


class RestoreCache(Ask[None], frozen=True):
    """Take the cache's device memory again, with the contents that were kept."""


type WorkerMessage = LaunchStep | CollectStep | ReleaseCache | RestoreCache


# ---- out of the step ---------------------------------------------------------------------------


class Finished(Struct, frozen=True, gc=False):
    """A request ended: why, as the engine decided it."""

    request_id: RequestId
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The token id or the stop word that ended it."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
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


class Planned(Struct, frozen=True, gc=False):
    """The reply to NextStep: what to run next, and what the last result meant."""

    plan: StepPlan | None
    batch: TokenBatch | None
    stats: "EngineStats"


class EngineStats(Struct, frozen=True, gc=False):
    """The engine after a step, as its scheduler saw it."""

    step: int = 0
    """Steps planned so far."""
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    prefix_hit_rate: float = 0.0
    preemptions: int = 0
    """Since the start."""
    prefill_tokens: int = 0
    """Tokens computed other than one by one, since the start."""


class Delta(Struct, frozen=True, gc=False):
    """What a stream got since the delta before: text, tokens, and at the last why it ended."""

    text: str
    token_ids: list[int]
    log_probs: list[float] | None = None
    top_n_logprobs: list[dict[str, float]] | None = None
    finish_reason: str | None = None
    """None until the last delta."""
    stop_reason: int | str | None = None


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
    policy_epoch: tuple[tuple[int, int], ...] | None = None
    kv_cache_epoch: tuple[tuple[int, int], ...] | None = None
