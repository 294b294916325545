"""The scheduler: whatever comes and goes, each request gets the tokens it would get alone."""

from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megallm.core_async.messages import FinishAll, HoldNew, PreemptAll
from megallm.core_async.plan.policy import Limits
from tests.actors.scheduling import Prompt, Pump, pumping

pytestmark = pytest.mark.anyio

MAX_BLOCKS = 10
EVENTS = [*["submit"] * 6, *["turns"] * 12, *["abort"] * 3, "preempt", "hold", "admit", "finish"]


def any_limits(random: Random) -> Limits:
    """Gives small limits of a step."""
    max_requests = random.randint(1, 4)
    return Limits(
        max_tokens=random.randint(max_requests, 12),
        max_requests=max_requests,
        block_size=random.randint(1, 4),
        chunks_prompts=random.choice([False, True]),
    )


def any_prompt(random: Random, max_length: int) -> Prompt:
    """Gives a prompt whose output may end by any of its tokens, and fits with it."""
    length = random.randint(1, max_length - 1)
    tokens = tuple(random.randint(0, 96) for _ in range(length))
    num_new = random.randint(1, max_length - length)
    min_new = random.randint(0, num_new)
    stop_ids = (random.choice(Prompt(tokens, num_new).output),) if random.randint(0, 1) else ()
    return Prompt(
        tokens,
        num_new=0 if (is_scored_only := random.randint(0, 9) == 0) else num_new,
        stop_ids=stop_ids,
        min_new=min_new if stop_ids else 0,
        scores=is_scored_only or random.randint(0, 3) == 0,
        wants_log_probs=(wants_log_probs := random.randint(0, 2) == 0),
        num_top=random.randint(0, 3) if wants_log_probs else 0,
    )


class Play:
    """A random run of an engine's life."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.aborted: set[int] = set()

    async def run(self, num_events: int) -> Pump:
        """Lets so many things happen, then runs to the end and looks at every account."""
        num_blocks = self.random.randint(2, MAX_BLOCKS)
        async with pumping(any_limits(self.random), num_blocks) as pump:
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
                length = pump.pool.num_blocks * pump.limits.block_size
                num = self.random.randint(1, 3)
                await pump.submit(*[any_prompt(self.random, length) for _ in range(num)])
            case "turns":
                for _ in range(self.random.randint(1, 6)):
                    await pump.turn()
            case "abort" if live:
                key = self.random.choice(live)
                self.aborted.add(key)
                pump.closed.append(key)
            case "preempt":
                await pump.run(may_plan=False)
                await pump.scheduler.address.ask(PreemptAll())
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
@settings(max_examples=300)
def test_every_request_gets_the_tokens_it_would_get_alone(
    random: Random, num_events: int, backend: str
) -> None:
    """The engine's promise: no batch, chunk, shortage, preemption or abort of others changes an output.

    Two plans are in flight all along. At the end every block and every row is free.
    """
    anyio.run(Play(random).run, num_events, backend=backend)


@pytest.mark.parametrize("seed", range(24))
async def test_the_promise_holds_over_long_runs(seed: int) -> None:
    """Faults that need many requests and many steps to come about: small examples are found by the test above."""
    pump = await Play(Random(seed)).run(200)
    assert len(pump.plans) > 50
