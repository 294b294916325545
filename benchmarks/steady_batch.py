"""A batch that stays full, for the scheduler alone: the real roster and pool, no actors, no model."""

import random
import time
from collections import deque
from typing import Final

from benchmarks.load import SEED
from megallm.core_async.messages import NewRequest, RequestId, Sampling, StepResult, TextSpec, pack_ints
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.flight import Outcome
from megallm.core_async.plan.policy import Limits
from megallm.core_async.plan.roster import Roster

DEPTH: Final = 2
"""Plans in flight, as in the engine."""


class SteadyBatch:
    """Rows that decode; whoever ends is followed by another, with a random prompt: nothing is ever shared."""

    PROMPTS: Final = (256, 768)
    """Tokens, at least and at most."""
    OUTPUTS: Final = (64, 192)

    def __init__(self, batch: int, block_size: int, *, shares_prefixes: bool) -> None:
        self._random = random.Random(SEED)
        blocks_of_row = -(-(self.PROMPTS[1] + self.OUTPUTS[1]) // block_size)
        self._pool = BlockPool(2 * batch * blocks_of_row, block_size)
        limits = Limits(
            max_tokens=batch * self.PROMPTS[1],
            max_requests=batch,
            block_size=block_size,
            chunks_prompts=False,
            shares_prefixes=shares_prefixes,
        )
        self.roster = Roster(limits, num_blocks=self._pool.num_blocks, max_waiting=2 * batch)
        self._pending: deque[StepResult] = deque()
        self._num_requests = 0
        self._submit(batch)

    def run(self, num_steps: int) -> float:
        """Runs so many steps, and gives the scheduler's seconds."""
        seconds = 0.0
        for _ in range(num_steps):
            outcome = Outcome()
            result = self._pending.popleft() if len(self._pending) == DEPTH else None
            start = time.thread_time()
            if result is not None:
                self.roster.apply(result, outcome)
                self.roster.forget_finished(outcome)
            seconds += time.thread_time() - start
            self._submit(len(outcome.finished))
            start = time.thread_time()
            self._plan()
            seconds += time.thread_time() - start
        stats = self.roster.stats()
        assert (stats.prefix_hit_rate, stats.preemptions) == (0, 0), f"not what was to be measured: {stats}"
        return seconds

    def _plan(self) -> None:
        choice = self.roster.choose()
        wish = self.roster.wish(choice)
        grant = None
        if wish is not None:
            grant = self._pool.reserve(wish)
            self.roster.settle(choice, grant, 0.0)
        plan = self.roster.commit(choice, grant)
        assert plan is not None, "nothing to compute"
        self._pending.append(StepResult(plan.step, pack_ints([1] * plan.samples.count(1))))

    def _submit(self, num_requests: int) -> None:
        """Queues requests with random prompts."""
        draw, requests = self._random, list[NewRequest]()
        for _ in range(num_requests):
            self._num_requests += 1
            key = RequestId(self._num_requests)
            prompt = draw.choices(range(100_000), k=draw.randint(*self.PROMPTS))
            output = draw.randint(*self.OUTPUTS)
            requests.append(NewRequest(key, pack_ints(prompt), output, (), Sampling(), TextSpec(key)))
        self.roster.submit(requests)
