"""What the scheduler knows of one request. Plain and mutable; the scheduler is its one owner.

There is no prefill state and no decode state: a request has tokens, some of them computed, and
what is missing is computed next. `num_tokens` counts the ones sampled by plans still in flight as
well; their ids are on the device and not in `tokens` yet.
"""

import sys
from array import array

from msgspec import structs

from megallm.core_async.messages import (
    Admission,
    FilledBlocks,
    Finished,
    Ints,
    NewRequest,
    RequestId,
    Row,
    RowSetup,
    TextSpec,
    unpack_ints,
)
from megallm.core_async.plan.prefix import extend_keys, root_of

NO_ROW = Row(-1)
NEVER = sys.maxsize
"""More tokens than any request has."""


class Request:
    """One prompt on its way to an output."""

    __slots__ = (
        "capacity",
        "events",
        "fill_at",
        "finish_reason",
        "has_started",
        "is_decoding",
        "is_waiting",
        "keys",
        "kv_cache_epoch",
        "max_tokens",
        "new",
        "num_cached",
        "num_computed",
        "num_filled",
        "num_passed",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "num_tokens",
        "order",
        "policy_epoch",
        "priority",
        "request_id",
        "root",
        "row",
        "shares_prefix",
        "tokens",
    )

    def __init__(self, new: NewRequest, epoch: int | None = None, *, shares_prefix: bool = False) -> None:
        self.new = new
        self.priority = new.priority
        self.is_waiting = False
        """Whether it stands in the waiting line."""
        self.num_passed = 0
        """How many were admitted that stood behind it."""
        self.request_id: RequestId = new.request_id
        self.tokens: array[int] = unpack_ints(new.prompt)
        """Prompt and output, as far as the host knows the ids."""
        self.num_prompt = len(self.tokens)
        self.num_tokens = self.num_prompt
        """Prompt and output, those sampled by plans in flight included."""
        self.max_tokens = self.num_prompt + new.max_new_tokens
        self.row = NO_ROW
        self.order = 0
        """Number of its admission: the lower, the later it yields its blocks."""
        self.num_computed = 0
        """Tokens whose keys and values are cached once the plans in flight have run."""
        self.capacity = 0
        """Tokens that the blocks of its row hold."""
        self.shares_prefix = shares_prefix or new.shares_prefix
        """Whether its blocks may be shared."""
        self.root = root_of(new.salt)
        self.keys: list[bytes] = []
        """Of the complete blocks of `tokens`, as far as they were needed."""
        self.num_filled = 0
        """Blocks of its row that the allocator knows to be filled."""
        self.fill_at = NEVER
        """Tokens from which on there are more of them."""
        self.num_cached: int | None = None
        """Tokens that its first admission found in the cache."""
        self.num_scored = 1 if new.scores_prompt else self.num_prompt
        """Tokens of the prompt whose log-probs were reported or are not wanted, the first among them."""
        self.is_decoding = False
        """Whether its row has sampled, so that its next input is on the device."""
        self.has_started = False
        """Whether a token of it was reported."""
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self.events: list[tuple[str, float]] = []
        """See messages.Finished."""
        self.policy_epoch = _from_start(epoch)
        """(place in the tokens from which on it holds, number of the weights) of its tokens."""
        self.kv_cache_epoch = _from_start(epoch)
        """The same of its keys and values."""

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def num_unknown(self) -> int:
        """Tokens sampled by plans in flight, whose ids are not known yet."""
        return self.num_tokens - len(self.tokens)

    def setup(self) -> RowSetup:
        """Gives what the ranks have to know of it at its row."""
        sampling = self.new.sampling
        min_new = self.new.min_new_tokens
        return RowSetup(
            row=self.row,
            sampling=sampling,
            num_prompt=self.num_prompt,
            known=Ints(self.tokens.tobytes()) if sampling.needs_history else Ints(b""),
            masked_ids=self.new.stop_token_ids if min_new and not sampling.grammar else (),
            masked_until=self.num_prompt + min_new,
            end_ids=self.new.stop_token_ids if sampling.grammar else (),
        )

    def targets(self, start: int, length: int) -> array[int]:
        """Gives the prompt token after each of `length` tokens from `start` on; -1 where none is wanted."""
        first, end = max(start + 1, self.num_scored), min(start + length + 1, self.num_prompt)
        wanted = self.tokens[first:end] if first < end else array("i")
        before = min(first - start - 1, length) if wanted else length
        return array("i", [-1]) * before + wanted + array("i", [-1]) * (length - before - len(wanted))

    def take_row(self, row: Row, order: int, epoch: int | None) -> None:
        """Begins to run at a row of the batch, with nothing computed."""
        self.row = row
        self.order = order
        self.kv_cache_epoch = _from_start(epoch)

    def mark_epoch(self, epoch: int) -> None:
        """Notes that the weights have changed: what is sampled next is of the new ones."""
        mark = (self.num_tokens - 1, epoch)
        self.policy_epoch = (*self.policy_epoch, mark) if self.policy_epoch else ((0, epoch),)
        self.kv_cache_epoch = (*self.kv_cache_epoch, mark) if self.kv_cache_epoch else ((0, epoch),)

    def finished(self, reason: str, stop_reason: int | str | None) -> Finished:
        """Gives the message that it ended."""
        return Finished(
            request_id=self.request_id,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached or 0,
            num_preemptions=self.num_preemptions,
            events=tuple(self.events),
            policy_epoch=self.policy_epoch or None,
            kv_cache_epoch=self.kv_cache_epoch or None,
        )

    def started_text(self) -> TextSpec:
        """Gives what the detokeniser has to know of it at its first result."""
        return structs.replace(
            self.new.text,
            num_cached_tokens=self.num_cached or 0,
            events=tuple(self.events),
            policy_epoch=self.policy_epoch or None,
            kv_cache_epoch=self.kv_cache_epoch or None,
        )

    def admission(self, row: Row, block_size: int, *, may_split: bool, max_passes: int) -> Admission:
        """Gives what the allocator has to know to admit it at a row."""
        if self.shares_prefix:
            extend_keys(self.keys, self.tokens, block_size, self.root)
        is_scored = self.num_scored < self.num_prompt
        return Admission(
            row=row,
            num_tokens=self.num_tokens,
            tokens=Ints(self.tokens.tobytes()) if self.keys else Ints(b""),
            keys=self.keys,
            root=self.root,
            max_cached=(self.num_scored if is_scored else self.num_tokens) - 1,
            may_split=may_split,
            may_be_passed=self.num_passed < max_passes,
        )

    def reuse(self, num_cached: int, block_size: int) -> None:
        """Counts tokens whose keys and values others have computed."""
        self.num_computed = self.capacity = num_cached
        self.num_filled = num_cached // block_size
        if self.shares_prefix:
            self.fill_at = (self.num_filled + 1) * block_size
        if self.num_cached is None:
            self.num_cached = num_cached

    def newly_filled(self, block_size: int) -> FilledBlocks | None:
        """Gives the blocks that are filled once the plans in flight have run, and were not given yet."""
        if not self.shares_prefix:
            return None
        end = min(self.num_computed, len(self.tokens)) // block_size
        if end <= self.num_filled:
            return None
        keys = self.keys
        extend_keys(keys, self.tokens, block_size, self.root)
        start, self.num_filled = self.num_filled, end
        self.fill_at = (end + 1) * block_size
        tokens = Ints(self.tokens[start * block_size : end * block_size].tobytes())
        return FilledBlocks(self.row, start, keys[start:end], keys[start - 1] if start else self.root, tokens)

    def leave_row(self) -> None:
        """Stops running: blocks and device state are gone, all tokens must be computed again."""
        self.row = NO_ROW
        self.num_computed = 0
        self.capacity = 0
        self.num_filled = 0
        self.is_decoding = False


def _from_start(epoch: int | None) -> tuple[tuple[int, int], ...]:
    return () if epoch is None else ((0, epoch),)
