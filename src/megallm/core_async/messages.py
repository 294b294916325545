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
    """Ask for the log-probability of each chosen token, under the raw logits."""


class NewRequest(Struct, frozen=True, gc=False):
    """One prompt as the scheduler takes it: already checked against the engine's limits."""

    request_id: RequestId
    prompt: Ints
    max_new_tokens: int
    """At least 1; prompt and output together fit max_sequence_length."""
    stop_token_ids: tuple[int, ...]
    """Ids that end the request; the id itself is kept as the last generated token."""
    sampling: Sampling
    text: "TextSpec"


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
    stop_token_ids: tuple[int, ...] = ()
    """Trailing ids of this set are left out of the text unless `keep_stop`."""


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


class StepResult(Struct, frozen=True, gc=False):
    """What one step gave: a new token for each sampling row, in batch order."""

    step: int
    tokens: Ints
    log_probs: Floats = Floats(b"")
    """Log-probability of each token, where the plan asked for them; else empty."""
    prepare_s: float = 0.0
    """Host seconds spent building the step's tensors."""
    forward_s: float = 0.0
    sample_s: float = 0.0


class LaunchStep(Struct, frozen=True, gc=False):
    """A plan was made: queue its work on the device."""

    plan: StepPlan


class CollectStep(Ask[StepResult], frozen=True):
    """Wait for the oldest step launched and give its result."""


# ---- out of the step ---------------------------------------------------------------------------


class Finished(Struct, frozen=True, gc=False):
    """A request ended: why, as the engine decided it."""

    request_id: RequestId
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The token id or the stop word that ended it."""
    num_cached_tokens: int = 0


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
    log_probs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    num_cached_tokens: int
    first_token_s: float | None
    """Loop time of the first token."""
    last_token_s: float | None
