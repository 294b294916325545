"""Any life of an engine: a roster, its line, the policy and a watched pool, in any order of events.

`python -m tests.plan.long_life NUM_STEPS [SEED]` lives one of so many steps.
"""

import sys
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from megallm.core_async.plan.policy import Limits
from tests.fakes import continuation
from tests.plan.rounds import Asked, Rounds
from tests.plan.watched_pool import WatchedPool

type Draw = tuple[int, int, int, int, int]
"""What a prompt is made of: see `AnyLife.asked`."""

MOST_LIVE = 40
"""Requests at a time in a long life: more would only stand in the line."""

draws = st.tuples(*[st.integers(0, 60)] * 4, st.integers(0, 255))


class AnyLife(RuleBasedStateMachine):
    """Requests come, run, fork, yield, are suspended and are aborted, in any order.

    `Rounds` looks at each plan, the watched pool at each grant, and the fake model computes from
    its blocks alone: a block that is wrong, or written by two, gives a wrong token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stems: list[tuple[int, ...]] = [(1, 1, 1, 1, 2, 2, 2, 2)]
        self.epoch = 0

    @initialize(
        num_blocks=st.sampled_from([3, 6, 12, 24]),
        block_size=st.integers(1, 4),
        max_requests=st.integers(1, 6),
        more_tokens=st.integers(0, 18),
        flags=st.integers(0, 31),
    )
    def begin(
        self, num_blocks: int, block_size: int, max_requests: int, more_tokens: int, flags: int
    ) -> None:
        """Makes a small engine."""
        limits = Limits(
            max_tokens=max_requests + more_tokens,
            max_requests=max_requests,
            block_size=block_size,
            chunks_prompts=bool(flags & 1),
            shares_prefixes=bool(flags & 6),
        )
        pool = WatchedPool(
            num_blocks, block_size, keeps_cached=flags & 24 != 0, max_held=num_blocks // 2 if flags & 8 else 0
        )
        self.rounds = Rounds(limits, pool)

    @rule(drawn=st.lists(draws, min_size=1, max_size=4))
    def requests_come(self, drawn: list[Draw]) -> None:
        """Several at once; many begin as others did, or went on."""
        self.rounds.submit(*map(self.asked, drawn))

    def asked(self, drawn: Draw) -> Asked:
        """Gives a request that fits: a stem, some of it, a tail of its own, an output."""
        stem, cut, tail, num_new, flags = drawn
        most = self.rounds.pool.num_blocks * self.rounds.limits.block_size
        tokens = (
            *self.stems[-1 - stem % len(self.stems)][:cut],
            *[(7 * tail + place) % 97 for place in range(tail % 12)],
        )
        tokens = (tokens or (5,))[: most - 1]
        num_new = 1 + num_new % min(most - len(tokens), 20)
        self.stems = [*self.stems[-5:], (*tokens, *continuation(tokens, num_new))]
        return Asked(
            tokens,
            num_new,
            priority=(0, 0, 0, 1, -1)[flags % 5],
            salt="red" if flags & 128 else "",
            is_fork=flags & 96 == 96,
            scores=flags & 24 == 24,
        )

    @rule(num_turns=st.integers(1, 8))
    def steps_run(self, num_turns: int) -> None:
        """The pump goes round."""
        for _ in range(num_turns):
            self.rounds.turn()

    @rule(place=st.integers(0, 20))
    def a_reader_leaves(self, place: int) -> None:
        """Waiting, running, or ended in the same step."""
        if live := self.rounds.live:
            self.rounds.abort(live[place % len(live)])

    @rule(keeps_contents=st.booleans())
    def the_cache_is_given_back(self, *, keeps_contents: bool) -> None:
        """Offloaded, or lost and computed again."""
        self.rounds.suspend(keeps_contents=keeps_contents)

    @rule()
    def the_weights_change(self) -> None:
        """With steps in flight or without."""
        self.epoch += 1
        self.rounds.mark_epoch(self.epoch)

    def teardown(self) -> None:
        """Every request ends, with the tokens it would have got alone, and everything is given back."""
        if hasattr(self, "rounds"):
            self.rounds.run()
            self.rounds.check_end()


def lived(seed: int, num_steps: int) -> AnyLife:
    """Gives the end of a life of so many steps or a few more; what was wrong in it has failed."""
    random = Random(seed)
    life = AnyLife()
    life.begin(
        random.choice([3, 6, 12, 24]),
        random.randint(1, 4),
        random.randint(1, 6),
        random.randint(0, 18),
        seed * 7 % 32,
    )
    while life.rounds.num_turns < num_steps:
        match random.choices(["come", "run", "leave", "suspend", "change"], [8, 20, 2, 1, 1])[0]:
            case "come" if len(life.rounds.live) >= MOST_LIVE:
                life.steps_run(8)
            case "come":
                life.requests_come([drawn_by(random) for _ in range(random.randint(1, 3))])
            case "run":
                life.steps_run(random.randint(1, 8))
            case "leave":
                life.a_reader_leaves(random.randrange(20))
            case "suspend":
                life.the_cache_is_given_back(keeps_contents=random.random() < 0.5)
            case _:
                life.the_weights_change()
    life.teardown()
    return life


def drawn_by(random: Random) -> Draw:
    """Gives what a prompt is made of."""
    stem, cut, tail, num_new = (random.randrange(60) for _ in range(4))
    return stem, cut, tail, num_new, random.randrange(256)


if __name__ == "__main__":
    ended = lived(int((sys.argv[2:] or ["0"])[0]), int(sys.argv[1]))
    watch = ended.rounds.pool.watch
    sys.stdout.write(
        f"{ended.rounds.num_turns:,} steps, {len(ended.rounds.courses):,} requests, {watch.num_hits:,} blocks"
        f" shared, {watch.num_evicted:,} evicted, {ended.rounds.roster.stats().preemptions:,} preemptions\n"
    )
