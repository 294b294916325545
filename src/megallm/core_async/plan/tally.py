"""What the scheduler has counted since the start. Plain and mutable; the roster is its one owner."""

from megallm.core_async.messages import EngineStats
from megallm.core_async.plan.request import Request


class Tally:
    """Sums since the start, and the allocator's counts of the last grant."""

    __slots__ = (
        "num_admissions",
        "num_blocks",
        "num_cached_blocks",
        "num_free",
        "num_generated",
        "num_hit",
        "num_preemptions",
        "num_prefilled",
        "num_queried",
        "num_steps",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached_blocks = 0
        self.num_steps = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_prefilled = 0
        """Tokens computed other than one by one."""
        self.num_generated = 0
        """Tokens that came with results."""
        self.num_queried = 0
        """Tokens of admitted requests whose prefix was looked up."""
        self.num_hit = 0
        """Those of them that were cached."""

    def admit(self, request: Request, num_cached: int) -> None:
        """Counts an admission, and what its prefix lookup found."""
        self.num_admissions += 1
        if request.shares_prefix:
            self.num_queried += request.num_tokens
            self.num_hit += num_cached

    def stats(self, *, running: int, waiting: int) -> EngineStats:
        """Gives the figures of now."""
        return EngineStats(
            step=self.num_steps,
            running=running,
            waiting=waiting,
            used_blocks=self.num_blocks - self.num_free - self.num_cached_blocks,
            cached_blocks=self.num_cached_blocks,
            free_blocks=self.num_free,
            prefix_hit_rate=self.num_hit / max(self.num_queried, 1),
            preemptions=self.num_preemptions,
            prefill_tokens=self.num_prefilled,
            prefix_query_tokens=self.num_queried,
            prefix_hit_tokens=self.num_hit,
            generated_tokens=self.num_generated,
        )
