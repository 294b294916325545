"""The roster, its line and the policy over a watched pool: any life of an engine, and that it gets on."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megallm.core_async.plan.policy import MAX_PASSES, Limits
from tests.plan.long_life import AnyLife, lived
from tests.plan.rounds import DEPTH, Asked, Rounds
from tests.plan.watched_pool import WatchedPool

TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(stateful_step_count=25)


@pytest.mark.parametrize("seed", range(20))
def test_any_long_life_ends_well(seed: int) -> None:
    """Faults that need many requests and many steps to come about; short lives are searched above."""
    life = lived(seed, 400)
    assert life.rounds.num_turns >= 400


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


def test_as_many_rows_sit_out_as_the_buffer_holds_and_each_says_so_once() -> None:
    """A pause is an event, however many steps it lasts: its record must not grow with them."""
    asked = [Asked((0,) * 3, 8), Asked((1,) * 8, 9), Asked((2,) * 6, 9)]
    rounds = rounds_of(Limits(64, 3, 4, chunks_prompts=False), 7, *asked, max_held=5)
    rounds.run()
    rounds.check_end()
    events = [
        [name for name, _ in course.ending.events] for course in rounds.courses.values() if course.ending
    ]
    assert [names.count("pause") for names in events] == [0, 1, 1]


@pytest.mark.parametrize("keeps_cached", [False, True])
@given(
    num_prompt=st.integers(1, 30),
    cancels=st.lists(st.integers(0, 25), min_size=2, max_size=6),
    block_size=st.integers(1, 4),
    max_tokens=st.integers(6, 40),
)
def test_forks_share_one_prefill_and_the_cancel_of_some_leaves_the_others(
    num_prompt: int, cancels: list[int], block_size: int, max_tokens: int, *, keeps_cached: bool
) -> None:
    """One prompt, n continuations: whoever leaves, the one that computes the prompt among them.

    `cancels`: the turn before which each is cancelled; none is when it is over 15.
    """
    limits = Limits(max_tokens, 6, block_size, chunks_prompts=True)
    prompt = tuple(range(num_prompt))
    forks = [Asked(prompt, 8, is_fork=True, salt="one of many") for _ in cancels]
    rounds = rounds_of(limits, 400, *forks, keeps_cached=keeps_cached)
    while rounds.turn():
        for key, turn in zip(list(rounds.courses), cancels, strict=True):
            if turn <= 15 and turn == rounds.num_turns and key in rounds.live:
                rounds.abort(key)
    rounds.check_end()
    if min(cancels) > 15:
        shared = (num_prompt - 1) // block_size * block_size
        num_prefilled = rounds.roster.stats().prefill_tokens
        assert num_prefilled == num_prompt + (len(forks) - 1) * (num_prompt - shared)
    assert rounds.pool.num_used == 0
    assert keeps_cached or rounds.pool.num_free == 400


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
