"""The roster, its line and the policy over a watched pool: any life of an engine, and that it gets on."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from megallm.core_async.plan.policy import MAX_PASSES, Limits
from tests.fakes import continuation
from tests.plan.rounds import DEPTH, Asked, Rounds
from tests.plan.watched_pool import WatchedPool

type Draw = tuple[int, int, int, int, int]
"""What a prompt is made of: see `AnyLife.asked`."""

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


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(stateful_step_count=25)


@pytest.mark.parametrize("seed", range(20))
def test_any_long_life_ends_well(seed: int) -> None:
    """Faults that need many requests and many steps to come about; short lives are searched above."""
    random = Random(seed)
    life = AnyLife()
    life.begin(
        random.choice([3, 6, 12, 24]),
        random.randint(1, 4),
        random.randint(1, 6),
        random.randint(0, 18),
        seed * 7 % 32,
    )
    for event in random.choices(["come", "run", "leave", "suspend", "change"], [8, 20, 2, 1, 1], k=200):
        match event:
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
    assert life.rounds.num_turns > 350


def drawn_by(random: Random) -> Draw:
    """Gives what a prompt is made of."""
    stem, cut, tail, num_new = (random.randrange(60) for _ in range(4))
    return stem, cut, tail, num_new, random.randrange(256)


# ---- progress ------------------------------------------------------------------------------------


def rounds_of(
    limits: Limits, num_blocks: int, *asked: Asked, max_held: int = 0, keeps_cached: bool = True
) -> Rounds:
    """Gives an engine that has been asked for all at once."""
    pool = WatchedPool(num_blocks, limits.block_size, max_held=max_held, keeps_cached=keeps_cached)
    rounds = Rounds(limits, pool)
    rounds.submit(*asked)
    return rounds


def num_serial_turns(rounds: Rounds) -> int:
    """Gives how many turns the requests would take one after the other, the cache all to each."""
    asked = [course.asked for course in rounds.courses.values()]
    return sum(each.num_new - (-len(each.tokens) // rounds.limits.max_tokens) for each in asked)


def num_needed(rounds: Rounds) -> int:
    """Gives how many tokens have to be computed when nobody ever yields."""
    asked = [course.asked for course in rounds.courses.values()]
    return sum(len(each.tokens) + each.num_new - 1 for each in asked)


def most_preemptions(rounds: Rounds) -> int:
    """Gives how often the unluckiest request yielded."""
    return max(course.ending.num_preemptions for course in rounds.courses.values() if course.ending)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=30),
    num_blocks=st.integers(2, 16),
    max_requests=st.integers(1, 12),
    more_tokens=st.integers(0, 20),
    flags=st.integers(0, 31),
)
def test_a_shortage_never_costs_more_turns_than_one_request_after_the_other(
    sizes: list[tuple[int, int]], num_blocks: int, max_requests: int, more_tokens: int, flags: int
) -> None:
    """The first of all computes something in every turn, so no two requests undo each other for ever.

    What is computed again stays a part of the whole, and nobody yields over and over.
    """
    block_size = 1 + flags // 8
    limits = Limits(max_requests + more_tokens, max_requests, block_size, bool(flags & 1), bool(flags & 2))
    most = num_blocks * block_size
    asked: list[Asked] = []
    for key, (length, num_new) in enumerate(sizes):
        tokens = tuple((key + place) % 97 for place in range(min(1 + length, most - 1)))
        asked.append(Asked(tokens, 1 + num_new % min(20, most - len(tokens))))
    rounds = rounds_of(limits, num_blocks, *asked, max_held=num_blocks // 2 if flags & 4 else 0)
    assert rounds.run() <= num_serial_turns(rounds) + DEPTH
    rounds.check_end()
    assert rounds.num_computed <= 3 * num_needed(rounds)
    assert most_preemptions(rounds) <= num_blocks


@pytest.mark.parametrize("max_held", [0, 16])
@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("chunks_prompts", [False, True])
def test_two_hundred_requests_end_although_the_cache_holds_ten(
    *, chunks_prompts: bool, shares_prefixes: bool, max_held: int
) -> None:
    """The cache is what everybody waits for; all get it, in fewer turns than a fifth of one by one."""
    random = Random(4)
    asked = [
        Asked(tuple(random.randrange(97) for _ in range(random.randint(1, 60))), random.randint(1, 40))
        for _ in range(200)
    ]
    rounds = rounds_of(Limits(64, 32, 4, chunks_prompts, shares_prefixes), 100, *asked, max_held=max_held)
    num_turns = rounds.run()
    rounds.check_end()
    assert num_turns < num_serial_turns(rounds) / 5
    assert rounds.num_computed < 1.3 * num_needed(rounds)
    assert 0 < most_preemptions(rounds) <= 4
    assert max(course.num_passes for course in rounds.courses.values()) <= MAX_PASSES + 32


def test_a_request_that_sits_out_goes_on_where_it_was() -> None:
    """The paused buffer trades blocks that idle for a while for work that is not done twice."""
    asked = [Asked((0,) * 17, 13), Asked((1,) * 8, 20)]
    limits = Limits(32, 2, 8, chunks_prompts=False)
    without, with_buffer = rounds_of(limits, 6, *asked), rounds_of(limits, 6, *asked, max_held=2)
    for rounds in (without, with_buffer):
        rounds.run()
        rounds.check_end()
    assert (most_preemptions(without), most_preemptions(with_buffer)) == (1, 0)
    assert with_buffer.num_computed == num_needed(with_buffer)
    assert without.num_computed == num_needed(without) + 16, "what the second had when it yielded"


def test_those_who_sit_out_wait_for_somebody_who_gets_on() -> None:
    """However large the buffer, somebody holds blocks and computes."""
    rounds = rounds_of(
        Limits(16, 8, 1, chunks_prompts=False),
        16,
        *[Asked((key,) * 3, 12) for key in range(12)],
        max_held=1000,
    )
    assert rounds.run() <= num_serial_turns(rounds) + DEPTH
    rounds.check_end()


def test_within_one_priority_the_first_to_come_is_the_first_to_start() -> None:
    """And the last to yield; the lower number goes before all others."""
    asked = [Asked((key,) * 4, 6, priority=priority) for key, priority in enumerate([1, 0, 1, 0, -1])]
    rounds = rounds_of(Limits(8, 1, 4, chunks_prompts=False), 8, *asked)
    started: list[int] = []
    while rounds.turn():
        started += [
            key for key, course in rounds.courses.items() if course.num_admissions and key not in started
        ]
    assert started == [5, 2, 4, 1, 3]
    rounds.check_end()
