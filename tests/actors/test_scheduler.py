"""The scheduler: whatever comes and goes, each request gets the tokens it would get alone."""

from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megallm.core_async.messages import FinishAll, HoldNew
from megallm.core_async.plan.policy import Limits
from tests.actors.scheduling import Prompt, Pump, pumping

pytestmark = pytest.mark.anyio

NUM_BLOCKS = [2, 3, 4, 5, 6, 7, 8, 16]
SHORT = 14
"""Tokens of most requests, prompt and output."""
EVENTS = [*["submit"] * 12, *["turns"] * 24, *["abort"] * 4, "preempt", "hold", "admit", "admit", "finish"]


def any_limits(random: Random) -> Limits:
    """Gives small limits of a step."""
    max_requests = random.randint(1, 4)
    return Limits(
        max_tokens=random.randint(max_requests, 12),
        max_requests=max_requests,
        block_size=random.randint(1, 4),
        chunks_prompts=random.choice([False, True]),
        shares_prefixes=random.choice([False, True, True]),
    )


def any_prompt(random: Random, max_length: int, stems: list[tuple[int, ...]]) -> Prompt:
    """Gives a prompt that fits with its output, which may end by any token; some begin as others did."""
    stem = random.choice([(), *stems[-4:]])[: random.randint(1, max_length - 1)]
    length = random.randint(max(1, len(stem)), max_length - 1)
    tokens = (*stem, *(random.randint(0, 96) for _ in range(length - len(stem))))
    num_new = random.randint(1, max_length - length)
    output = Prompt(tokens, num_new).output
    stems.append((*tokens, *output))
    stop_ids = (random.choice(output),) if random.randint(0, 1) else ()
    is_scored_only = random.randint(0, 9) == 0
    wants_log_probs = random.randint(0, 2) == 0
    return Prompt(
        tokens,
        num_new=0 if is_scored_only else num_new,
        stop_ids=stop_ids,
        min_new=random.randint(0, num_new) if stop_ids and not is_scored_only else 0,
        scores=is_scored_only or random.randint(0, 3) == 0,
        wants_log_probs=wants_log_probs,
        num_top=random.randint(0, 3) if wants_log_probs else 0,
        priority=random.choice([0, 0, 0, 1]),
        salt=random.choice(["", "", "", "mine"]),
        is_fork=random.randint(0, 3) == 0,
    )


class Play:
    """A random run of an engine's life."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.aborted: set[int] = set()
        self.stems: list[tuple[int, ...]] = []

    async def run(self, num_events: int) -> Pump:
        """Lets so many things happen, then runs to the end and looks at every account."""
        async with pumping(
            any_limits(self.random),
            self.random.choice(NUM_BLOCKS),
            keeps_cached=self.random.choice([False, True]),
            max_held=self.random.choice([0, 2, 6]),
        ) as pump:
            for _ in range(num_events):
                await self.happen(self.random.choice(EVENTS), pump)
            if pump.holds_new:
                await pump.admit_held()
            await pump.run()
            for request_id, account in pump.accounts.items():
                account.check("abort" if request_id in self.aborted else None)
            await pump.check_all_free()
        return pump

    async def happen(self, event: str, pump: Pump) -> None:
        """Lets one of the things happen that happen to an engine."""
        live = [
            key
            for key, account in pump.accounts.items()
            if account.ending is None and key not in self.aborted
        ]
        match event:
            case "submit":
                most = pump.pool.num_blocks * pump.limits.block_size
                length = most if self.random.randint(0, 5) == 0 else min(most, SHORT)
                num = self.random.randint(1, 4)
                await pump.submit(*[any_prompt(self.random, length, self.stems) for _ in range(num)])
            case "turns":
                for _ in range(self.random.randint(1, 6)):
                    await pump.turn()
            case "abort" if live:
                key = self.random.choice(live)
                self.aborted.add(key)
                pump.closed.append(key)
            case "preempt":
                await pump.lose_the_cache()
            case "hold":
                await pump.scheduler.address.ask(HoldNew())
                pump.holds_new = True
            case "admit":
                await pump.admit_held()
            case "finish":
                await pump.run(may_plan=False)
                pump.enter(await pump.scheduler.address.ask(FinishAll("abort")))
                self.aborted |= set(live)
            case _:
                pass


@given(
    random=st.randoms(use_true_random=False),
    num_events=st.integers(1, 20),
    backend=st.sampled_from(["asyncio", "trio"]),
)
@settings(max_examples=200)
def test_every_request_gets_the_tokens_it_would_get_alone(
    random: Random, num_events: int, backend: str
) -> None:
    """The engine's promise: no batch, chunk, shortage, preemption or abort of others changes an output.

    Two plans are in flight all along. At the end every block and every row is free.
    """
    anyio.run(Play(random).run, num_events, backend=backend)


async def test_the_promise_holds_over_long_runs() -> None:
    """Some faults need many requests and steps to come about; the runs must not be idle ones either."""
    num_preemptions = num_shared = num_passes = num_aborted = 0
    for seed in range(12):
        play = Play(Random(seed))
        pump = await play.run(200)
        num_preemptions += pump.stats.preemptions
        num_aborted += len(play.aborted)
        for account in pump.accounts.values():
            assert account.ending is not None
            num_shared += account.ending.num_cached_tokens > 0
            num_passes += account.num_passes
    assert min(num_preemptions, num_shared, num_passes, num_aborted) > 10
