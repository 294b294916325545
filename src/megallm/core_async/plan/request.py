"""What the scheduler knows of one request. Plain and mutable; the scheduler is its one owner.

There is no prefill state and no decode state: a request has tokens, some of them computed, and
what is missing is computed next. `num_tokens` counts the ones sampled by plans still in flight as
well; their ids are on the device and not in `tokens` yet.
"""

from array import array

from megallm.core_async.messages import NewRequest, RequestId, Row, unpack_ints

NO_ROW = Row(-1)


class Request:
    """One prompt on its way to an output."""

    __slots__ = (
        "capacity",
        "finish_reason",
        "has_started",
        "is_decoding",
        "max_tokens",
        "new",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_tokens",
        "order",
        "request_id",
        "row",
        "stop_ids",
        "tokens",
    )

    def __init__(self, new: NewRequest) -> None:
        self.new = new
        self.request_id: RequestId = new.request_id
        self.tokens: array[int] = unpack_ints(new.prompt)
        """Prompt and output, as far as the host knows the ids."""
        self.num_prompt = len(self.tokens)
        self.num_tokens = self.num_prompt
        """Prompt and output, those sampled by plans in flight included."""
        self.max_tokens = self.num_prompt + new.max_new_tokens
        self.stop_ids = frozenset(new.stop_token_ids)
        self.row = NO_ROW
        self.order = 0
        """Number of its admission: the lower, the later it yields its blocks."""
        self.num_computed = 0
        """Tokens whose keys and values are cached once the plans in flight have run."""
        self.capacity = 0
        """Tokens that the blocks of its row hold."""
        self.is_decoding = False
        """Whether its row has sampled, so that its next input is on the device."""
        self.has_started = False
        """Whether a token of it was reported."""
        self.finish_reason: str | None = None
        self.num_preemptions = 0

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def num_unknown(self) -> int:
        """Tokens sampled by plans in flight, whose ids are not known yet."""
        return self.num_tokens - len(self.tokens)

    def take_row(self, row: Row, order: int) -> None:
        """Begins to run at a row of the batch, with nothing computed."""
        self.row = row
        self.order = order

    def leave_row(self) -> None:
        """Stops running: blocks and device state are gone, all tokens must be computed again."""
        self.row = NO_ROW
        self.num_computed = 0
        self.capacity = 0
        self.is_decoding = False
