"""What is asked of the scheduler, the allocator and the lifecycle."""

from msgspec import Struct

from megallm.core_async.messages.ask import Ask
from megallm.core_async.messages.columns import BlockId, RequestId, Row
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


class ReserveBlocks(Ask[BlockGrant], frozen=True, gc=False):
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


class BlockCounts(Struct, frozen=True, gc=False):
    """How the cache is used."""

    num_blocks: int
    num_free: int
    num_used: int


class CountBlocks(Ask[BlockCounts], frozen=True):
    """Say how many blocks are free and used."""
