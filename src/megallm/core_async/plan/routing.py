"""Which data-parallel rank a request goes to: by the prefix that ranks have cached, and by their load. Pure.

The policies and the score are megatron-core's: `alpha * match + (1 - alpha) * free fraction`, the
latest use of the prefix before the lowest rank where scores are equal. So no rank gets a request
while it has over `alpha / (1 - alpha) * max_requests` more of them than another. What a rank has
cached is what was sent to it, until it reports otherwise or the table has no room to remember it.
"""

from collections import OrderedDict
from enum import StrEnum

from megallm.core_async.messages import PrefixReport, RequestId


class RoutingPolicy(StrEnum):
    """What counts as a match; the values of `InferenceConfig.prefix_caching_coordinator_policy`."""

    LONGEST_PREFIX = "longest_prefix"
    """The share of the prompt's blocks that a rank has, of the ranks that have most."""
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    """Whether a rank has the first block: one look-up, however long the prompt."""
    LOAD_BALANCED = "load_balanced"
    """Nothing does: the rank with the fewest requests is taken."""


class RoutingTable:
    """Which prefixes went to which rank, and which requests are there. The router is its one owner."""

    def __init__(
        self,
        num_ranks: int,
        *,
        policy: RoutingPolicy,
        alpha: float,
        max_requests: int,
        max_keys: int = 1_000_000,
    ) -> None:
        """`max_requests`: rows of a rank's batch. `max_keys`: the prefixes used longest ago are forgotten."""
        assert num_ranks > 0, f"{num_ranks} ranks"
        assert 0.0 <= alpha <= 1.0, f"alpha is {alpha}"
        self._policy = policy
        self._alpha = alpha
        self._max_requests = max_requests
        self._max_keys = max_keys
        self._num_pending: dict[int, int] = dict.fromkeys(range(num_ranks), 0)
        """Requests at each rank that is there, by rank, ascending."""
        self._rank_of: dict[RequestId, int] = {}
        self._uses: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        """By key: the ranks that have it, and when it last went there; what was used longest ago is first.

        A key that no rank has stays until there is no room: a rank may report that it has it again.
        """
        self._flushed: dict[int, int] = dict.fromkeys(range(num_ranks), 0)
        """By rank: when it last had nothing; uses up to then count no more, and go as they are come upon."""
        self._now = 0
        """Requests routed and caches flushed."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that are there."""
        return list(self._num_pending)

    @property
    def num_keys(self) -> int:
        """Prefixes that are remembered."""
        return len(self._uses)

    def num_pending(self, rank: int) -> int:
        """Gives how many requests are at a rank."""
        return self._num_pending[rank]

    def route(self, request_id: RequestId, keys: list[bytes], beside: RequestId | None = None) -> int:
        """Picks the rank of a request, which is pending there until `end`; some rank must be there.

        `keys`: of the complete blocks of its prompt, see plan/prefix.py; none: the load decides.
        `beside`: a request that was routed before, and has not ended: its rank is taken.
        """
        assert self._num_pending, "no rank is there"
        assert request_id not in self._rank_of, f"request {request_id} has a rank already"
        if self._policy is RoutingPolicy.LOAD_BALANCED:
            keys = []
        elif self._policy is RoutingPolicy.FIRST_PREFIX_BLOCK:
            keys = keys[:1]
        rank = self._best(keys) if beside is None else self._rank_of[beside]
        self._now += 1
        self._num_pending[rank] += 1
        self._rank_of[request_id] = rank
        self._remember(rank, keys)
        return rank

    def end(self, request_id: RequestId) -> None:
        """Notes that a request has ended; one whose rank was lost is not known any more."""
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._num_pending[rank] -= 1

    def lose(self, rank: int) -> list[RequestId]:
        """Notes that a rank is gone; gives the requests that were there, in the order they came."""
        del self._num_pending[rank]
        lost = [request_id for request_id, other in self._rank_of.items() if other == rank]
        for request_id in lost:
            del self._rank_of[request_id]
        self.forget_prefixes(rank)
        return lost

    def add(self, rank: int) -> None:
        """Notes that a rank has come, or come back, with nothing cached and no request."""
        assert rank not in self._num_pending, f"rank {rank} is there already"
        self._num_pending = dict(sorted({**self._num_pending, rank: 0}.items()))
        self.forget_prefixes(rank)

    def forget_prefixes(self, rank: int) -> None:
        """Notes that a rank's cache was flushed: its weights have changed, or its cache is gone. O(1)."""
        self._flushed[rank] = self._now
        self._now += 1

    def correct(self, rank: int, report: PrefixReport) -> None:
        """Notes what a rank reports of its cache; of prefixes that no request asked for, nothing.

        A report that comes too late, of a rank that is gone, means nothing.
        """
        if rank not in self._num_pending:
            return
        if report.is_flushed:
            self.forget_prefixes(rank)
        uses, now, flushed = self._uses, self._now, self._flushed[rank]
        for key in report.forgotten:
            if (ranks := uses.get(key)) is not None:
                ranks.pop(rank, None)
        for key in report.known:
            if (ranks := uses.get(key)) is not None and ranks.get(rank, flushed) <= flushed:
                ranks[rank] = now

    # ---- below ---------------------------------------------------------------------------------

    def _best(self, keys: list[bytes]) -> int:
        """Only those that match, and the idlest of all, can have the highest score."""
        pending = self._num_pending
        idlest = min(pending, key=pending.__getitem__)
        depth, uses = self._deepest(keys)
        if not uses:
            return idlest
        match = self._alpha * depth / len(keys)
        best, best_score = idlest, (self._free_score(idlest) + match * (idlest in uses), uses.get(idlest, 0))
        for rank, use in uses.items():
            score = (match + self._free_score(rank), use)
            if score > best_score or (score == best_score and rank < best):
                best, best_score = rank, score
        return best

    def _free_score(self, rank: int) -> float:
        """Below zero where requests wait, which megatron-core does not tell apart from a full rank."""
        num_free = self._max_requests - self._num_pending[rank]
        return (1.0 - self._alpha) * num_free / self._max_requests

    def _deepest(self, keys: list[bytes]) -> tuple[int, dict[int, int]]:
        """Gives how many blocks of the prompt some rank has, and the ranks that have so many.

        Nothing is had without what it follows, so the first key that no rank has ends the search.
        """
        depth, uses = 0, self._uses
        for key in keys:
            if not uses.get(key):
                break
            depth += 1
        for left in range(depth, 0, -1):
            ranks = uses[keys[left - 1]]
            flushed = [rank for rank, use in ranks.items() if use <= self._flushed[rank]]
            for rank in flushed:
                del ranks[rank]
            if ranks:
                return left, ranks
        return 0, {}

    def _remember(self, rank: int, keys: list[bytes]) -> None:
        """Notes a use of the keys, the last of them first: it is forgotten first, too."""
        uses, now = self._uses, self._now
        for key in reversed(keys):
            ranks = uses.get(key)
            if ranks is None:
                uses[key] = {rank: now}
            else:
                ranks[rank] = now
                uses.move_to_end(key)
        while len(uses) > self._max_keys:
            uses.popitem(last=False)
