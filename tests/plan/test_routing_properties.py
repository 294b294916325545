"""What holds of a routing table whatever happens: who is taken, how uneven it gets, what it remembers."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megallm.core_async.messages import PrefixReport, RequestId
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable
from tests.plan.test_routing import keys_of

NUM_RANKS, MAX_REQUESTS, MAX_KEYS = 3, 4, 12

some_rank = st.integers(0, NUM_RANKS - 1)
a_prompt = st.text("ab", max_size=3)


class Routes(RuleBasedStateMachine):
    """A table beside what it must know: who is where, and which keys a rank may have."""

    @initialize(policy=st.sampled_from(list(RoutingPolicy)), alpha=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]))
    def begin(self, policy: RoutingPolicy, alpha: float) -> None:
        """Starts with every rank there."""
        self.policy, self.alpha = policy, alpha
        self.table = RoutingTable(
            NUM_RANKS, policy=policy, alpha=alpha, max_requests=MAX_REQUESTS, max_keys=MAX_KEYS
        )
        self.alive = set(range(NUM_RANKS))
        self.rank_of: dict[RequestId, int] = {}
        self.may_have: list[set[bytes]] = [set() for _ in range(NUM_RANKS)]
        self.num_routed = 0

    @precondition(lambda self: self.alive)
    @rule(prompts=st.lists(a_prompt, min_size=1, max_size=5))
    def route(self, prompts: list[str]) -> None:
        """A request goes to a rank that is there, and to a busier one only for a prefix."""
        for prompt in prompts:
            self._route(prompt)

    def _route(self, prompt: str) -> None:
        keys = keys_of(prompt)
        before = Counter(self.rank_of.values())
        self.num_routed += 1
        rank = self.table.route(RequestId(self.num_routed), keys)
        assert rank in self.alive
        above = before[rank] - min(before[each] for each in self.alive)
        looked_at = {
            RoutingPolicy.LONGEST_PREFIX: keys,
            RoutingPolicy.FIRST_PREFIX_BLOCK: keys[:1],
            RoutingPolicy.LOAD_BALANCED: [],
        }[self.policy]
        depth = sum(key in self.may_have[rank] for key in looked_at)
        if not depth or not self.alpha:
            assert not above, f"rank {rank} has none of the prompt and {above} requests more than another"
        elif self.alpha < 1:
            bound = self.alpha / (1 - self.alpha) * MAX_REQUESTS * depth / len(looked_at)
            assert above <= bound + 1e-9, f"rank {rank} has {above} requests more than another, over {bound}"
        self.rank_of[RequestId(self.num_routed)] = rank
        self.may_have[rank].update(looked_at)

    @precondition(lambda self: self.rank_of)
    @rule(choice=st.integers(0, 1000))
    def end(self, choice: int) -> None:
        """A request ends, and a second word of its end means nothing."""
        request_id = list(self.rank_of)[choice % len(self.rank_of)]
        del self.rank_of[request_id]
        self.table.end(request_id)
        self.table.end(request_id)

    @rule(rank=some_rank)
    def lose_or_add(self, rank: int) -> None:
        """A rank goes and hands back exactly what was there, in order; or it comes with nothing."""
        self.may_have[rank].clear()
        if rank in self.alive:
            self.alive.remove(rank)
            lost = [request_id for request_id, other in self.rank_of.items() if other == rank]
            assert self.table.lose(rank) == lost
            for request_id in lost:
                del self.rank_of[request_id]
        else:
            self.alive.add(rank)
            self.table.add(rank)

    @rule(rank=some_rank, prompt=a_prompt, is_flushed=st.booleans())
    def report_known(self, rank: int, prompt: str, *, is_flushed: bool) -> None:
        """A rank says what it has; or it is gone and says so too late."""
        self.table.correct(rank, PrefixReport(keys_of(prompt), [], is_flushed))
        if rank in self.alive:
            if is_flushed:
                self.may_have[rank].clear()
            self.may_have[rank].update(keys_of(prompt))

    @rule(rank=some_rank, prompt=a_prompt)
    def report_forgotten(self, rank: int, prompt: str) -> None:
        """A rank says what it has no more, and perhaps never had."""
        self.table.correct(rank, PrefixReport([], keys_of(prompt)[::-1]))
        self.may_have[rank].difference_update(keys_of(prompt))

    @rule(rank=some_rank)
    def flush(self, rank: int) -> None:
        """A rank's weights change."""
        self.table.forget_prefixes(rank)
        self.may_have[rank].clear()

    @invariant()
    def counts_hold(self) -> None:
        """Requests are counted where they are, and the table has its size."""
        assert self.table.ranks == sorted(self.alive)
        counts = Counter(self.rank_of.values())
        assert [self.table.num_pending(rank) for rank in sorted(self.alive)] == [
            counts[rank] for rank in sorted(self.alive)
        ]
        assert self.table.num_keys <= MAX_KEYS


TestRoutes = Routes.TestCase
TestRoutes.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", [RoutingPolicy.LONGEST_PREFIX, RoutingPolicy.FIRST_PREFIX_BLOCK])
def test_the_prefix_alone_decides_at_the_highest_weight(policy: RoutingPolicy) -> None:
    """However long the line there; a prompt that nobody has goes to the idlest all the same."""
    table = RoutingTable(2, policy=policy, alpha=1.0, max_requests=2)
    prompts = ["ab"] * 9 + ["xy"] * 3
    ranks = [table.route(RequestId(number), keys_of(prompt)) for number, prompt in enumerate(prompts)]
    assert ranks == [0] * 9 + [1] * 3


def test_a_flush_costs_the_same_however_much_is_remembered() -> None:
    """All ranks are flushed when a trainer's weights change, and requests wait behind it."""
    table = RoutingTable(64, policy=RoutingPolicy.LONGEST_PREFIX, alpha=0.5, max_requests=4)
    for number in range(1000):
        table.route(RequestId(number), [b"%d" % number])
    for rank in range(64):
        table.forget_prefixes(rank)
    assert table.num_keys == 1000, "what is gone is dropped when it is come upon, and not by a search"
