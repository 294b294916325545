"""One step, to the ranks and back."""

from msgspec import Struct

from megallm.core_async.messages.ask import Ask
from megallm.core_async.messages.columns import Floats, Ints, Row
from megallm.core_async.messages.request import Sampling


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
    end_ids: tuple[int, ...] = ()
    """Ids that end the request, where `sampling.grammar` holds it: allowed once the grammar is complete."""


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
    """One byte a row: 1 where it has targets. Empty: no row has."""
    targets: Ints = Ints(b"")
    """For each scored row `lengths[i]` ids: the token that follows each computed one, or -1 where
    its log-prob is not wanted."""

    @classmethod
    def empty(cls) -> "StepPlan":
        """Gives the plan without rows, numbered 0: a rank takes part in its step and computes nothing."""
        nothing = Ints(b"")
        return cls(
            step=0,
            num_decode=0,
            rows=nothing,
            starts=nothing,
            lengths=nothing,
            samples=b"",
            tokens=nothing,
            new_rows=[],
            changed_rows=nothing,
            changed_starts=nothing,
            changed_counts=nothing,
            blocks=nothing,
        )


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
    failed: list[tuple[int, str]] = []
    """(place among the tokens, why) of rows that can't go on: their requests end with what they have."""
    score_top: TopLogProbs | None = None
    """The same places."""
    prepare_s: float = 0.0
    """Host seconds spent building the step's tensors."""
    forward_s: float = 0.0
    sample_s: float = 0.0
    is_captured: bool = False
    """Whether the step was replayed from a captured graph."""


class LaunchStep(Struct, frozen=True, gc=False):
    """A plan was made: queue its work on the device."""

    plan: StepPlan


class CollectStep(Ask[StepResult], frozen=True):
    """Wait for the oldest step launched and give its result."""


class FollowStep(Ask[None], frozen=True):
    """Queue the work of a plan that the leader of the ranks has made; its result is the leader's to collect.

    Answered once the plan before it has run.
    """

    plan: StepPlan


class ReleaseCache(Ask[None], frozen=True):
    """Give the cache's device memory back."""

    kept: Ints
    """Blocks whose contents move to host memory, each once; what the others hold is lost."""


class RestoreCache(Ask[None], frozen=True):
    """Take the cache's device memory again, with the contents of the blocks that were kept."""


type WorkerMessage = LaunchStep | CollectStep | FollowStep | ReleaseCache | RestoreCache
