"""What is asked of the scheduler, the allocator and the lifecycle."""

from msgspec import Struct

from megallm.core_async.messages.ask import Ask
from megallm.core_async.messages.columns import BlockId, Ints, RequestId, Row
from megallm.core_async.messages.output import Planned, TokenBatch
from megallm.core_async.messages.request import NewRequest
from megallm.core_async.messages.step import StepResult

# ---- to the scheduler --------------------------------------------------------------------------


class Submit(Ask[None], frozen=True, gc=False):
    """Queue these requests, in order; one message for a whole batch.

    Raises EngineBusy, queueing none of them, when the waiting list has no room for all.
    """

    requests: list[NewRequest]


class NextStep(Ask[Planned], frozen=True, gc=False):
    """Apply the last result, drop the closed requests, and plan the next step."""

    result: StepResult | None
    closed: list[RequestId]
    """Requests whose readers left or whose text reached a stop word."""
    may_plan: bool = True
    """False while draining: only the result is applied."""


class PreemptAll(Ask[None], frozen=True):
    """Take every running request's blocks away; each recomputes its tokens when it runs again.

    Legal only while no step is in flight.
    """


class FinishAll(Ask[TokenBatch], frozen=True):
    """End every request, running or waiting, with what it has; the batch says so to the detokeniser.

    Legal only while no step is in flight.
    """

    finish_reason: str


class HoldNew(Ask[None], frozen=True):
    """Keep requests that come from now on aside, until `AdmitHeld`; those here already run to their end."""


class AdmitHeld(Ask[None], frozen=True):
    """Queue the requests that were kept aside, and those that come."""


class ListContents(Ask[Ints], frozen=True):
    """Say which blocks some row holds or a prefix may find, ascending: what the others hold is never read.

    Asked of the scheduler, which asks the allocator, while no step is in flight.
    """


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


class FilledBlocks(Struct, frozen=True, gc=False):
    """Blocks of a row hold all their tokens once the plans in flight have run: others may share them."""

    row: Row
    start: int
    """Index of the first in the row's block table; the others follow it there."""
    keys: list[bytes]
    parent: bytes
    """The key of the block before the first, or the root."""
    tokens: Ints
    """Of all the blocks."""


class Admission(Struct, frozen=True, gc=False):
    """A waiting request that would run at a row."""

    row: Row
    num_tokens: int
    """Tokens to be computed before it can sample, all of them known."""
    tokens: Ints
    keys: list[bytes]
    """Of the complete blocks of `tokens`; empty where nothing is to be shared."""
    root: bytes
    max_cached: int
    """Tokens that may come from the cache, at most: less than all."""
    may_split: bool
    """Whether fewer tokens than are missing will do."""
    may_be_passed: bool
    """Whether one that comes after it may be admitted when it can't."""


class BlockGrant(Struct, frozen=True, gc=False):
    """What `ReserveBlocks` gave: columns of block-table changes, and who lost theirs."""

    admitted: list[int]
    """Which of the admissions hold their blocks now, by index, ascending."""
    num_cached: list[int]
    """For each of those: tokens whose blocks are shared and need no computing."""
    num_chunk: list[int]
    """For each of those: tokens to compute in this step."""
    preempted: list[Row]
    """The last of `victims`, last first, those that hold nothing included."""
    held: list[Row]
    """Running rows that did not get their block and keep those they have: they sit out this step."""
    changed_rows: list[Row]
    changed_starts: list[int]
    """Index in the row's block table of its first new entry."""
    changed_counts: list[int]
    blocks: list[BlockId]
    """The new entries of all changed rows, one after the other."""
    num_free: int
    """Blocks that nobody holds and whose contents mean nothing."""
    num_cached_blocks: int
    """Blocks that nobody holds and that a prefix may still find."""


class ReserveBlocks(Ask[BlockGrant], frozen=True, gc=False):
    """Share what is filled, give back what is released, then grant blocks from the top.

    `rows` are running and want room for `num_tokens` tokens each, in the order of `victims`; rows
    that have room may be left out. One that is short sits out, and keeps its blocks, while the
    paused buffer has room for those of all that do; the first of `victims` never does. Else the
    last of `victims` lose theirs until the row fits, the row itself last of all; a row granted in
    this call is never taken from, and the first of `victims` can have the whole pool.

    Admissions are granted in order from what nobody holds, their cached prefix first, until
    `budget` tokens are to be computed. One whose next block is being computed by another waits for
    it. One that does not fit ends the granting unless it may be passed. None is granted when a
    running row had to yield or was held: it comes first.
    """

    filled: list[FilledBlocks]
    released: list[Row]
    rows: list[Row]
    num_tokens: list[int]
    victims: list[Row]
    """All running rows, in order of precedence."""
    admissions: list[Admission]
    budget: int


class ForgetPrefixes(Ask[None], frozen=True):
    """Make every block unknown to the prefix cache; what running rows hold is not shared any more."""


class BlockCounts(Struct, frozen=True, gc=False):
    """How the cache is used."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int


class CountBlocks(Ask[BlockCounts], frozen=True):
    """Say how many blocks are free and used."""


class PrefixReport(Struct, frozen=True, gc=False):
    """What became of a prefix cache since the report before, by keys of blocks; each is in one list."""

    known: list[bytes]
    """A block came to hold that prefix."""
    forgotten: list[bytes]
    """None holds it any more."""
    is_flushed: bool = False
    """Before all of these it was emptied."""


class ReportPrefixes(Ask[PrefixReport], frozen=True):
    """Say what the prefix cache has come to know and has forgotten; nothing where nobody notes it."""


# ---- to the router -----------------------------------------------------------------------------


class RouteRequests(Ask[list[int]], frozen=True, gc=False):
    """Say which data-parallel rank each request goes to; each counts as there until it ends."""

    request_ids: list[RequestId]
    keys: list[list[bytes]]
    """Of the complete blocks of each prompt, see plan/prefix.py; none: the load alone decides."""
    beside: tuple[RequestId | None, ...] = ()
    """For each the earlier one whose rank it shares, blocks and all; empty: there are no such."""


class RequestsEnded(Struct, frozen=True, gc=False):
    """Requests have ended, wherever they were."""

    request_ids: list[RequestId]


class DropRank(Ask[list[RequestId]], frozen=True, gc=False):
    """Send nothing to a rank that is gone; the reply is the requests that were there, in order."""

    rank: int


class RankJoined(Struct, frozen=True, gc=False):
    """A rank has come, or come back, with an empty cache."""

    rank: int


class PrefixesChanged(Struct, frozen=True, gc=False):
    """A rank has reported what became of its prefix cache; once a step at most."""

    rank: int
    report: PrefixReport
