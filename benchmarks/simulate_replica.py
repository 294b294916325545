"""One replica of a simulated service: the real scheduler and allocator, and no model behind them.

It goes by the order of events that the simulation gives it, as the engine's pump goes by its link's
results: two plans in flight, each of which ends when the cost model says.
"""

from collections import deque

from anyio.abc import TaskGroup

from benchmarks.simulate_cost import CostModel
from megallm.core_async.actors.allocator import Allocator
from megallm.core_async.actors.scheduler import Scheduler
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import DEPTH
from megallm.core_async.kit.gate import Gate
from megallm.core_async.messages import (
    EngineStats,
    Ints,
    NewRequest,
    NextStep,
    PrefixReport,
    ReportPrefixes,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
    pack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.policy import Limits
from megallm.core_async.plan.prefix_changes import PrefixChanges
from megallm.core_async.plan.roster import Roster


class Replica:
    """Scheduler, allocator, and a device that is busy until some time."""

    def __init__(self, config: EngineConfig, cost: CostModel, *, reports: bool = False) -> None:
        """`reports`: notes what becomes of its prefixes."""
        roster = Roster(Limits.of(config), num_blocks=config.num_blocks, max_waiting=config.max_waiting)
        self._changes = PrefixChanges() if reports else None
        self._allocator = Allocator(BlockPool.of(config, self._changes), self._changes)
        self._scheduler = Scheduler(roster, self._allocator.address, Gate())
        self._decode_s = cost.table(config.max_requests)
        self._prompt_token_s = cost.prompt_token_s
        self._tokens = pack_ints([1] * config.max_requests)
        self._pending: deque[tuple[float, StepResult]] = deque()
        """Plans in flight: when each ends, and what it gives."""
        self._free_s = 0.0
        """When the device is idle again."""
        self.busy_s = 0.0
        self.num_steps = 0
        self.stats = EngineStats(free_blocks=config.num_blocks)

    @property
    def is_idle(self) -> bool:
        """Whether no plan is in flight: a new request has to start it."""
        return not self._pending

    async def start(self, tasks: TaskGroup) -> None:
        """Starts the actors."""
        await tasks.start(self._allocator.run)
        await tasks.start(self._scheduler.run)

    async def submit(self, request: NewRequest) -> None:
        """Queues a request."""
        await self._scheduler.address.ask(Submit([request]))

    async def turn(self, now_s: float) -> tuple[TokenBatch | None, float | None]:
        """Takes the result that has come by now and plans until two plans are in flight.

        Gives what the result meant, and when the next one comes; None for both where there is none.
        """
        result = None
        if self._pending and self._pending[0][0] <= now_s:
            result = self._pending.popleft()[1]
        batch: TokenBatch | None = None
        while True:
            planned = await self._scheduler.address.ask(NextStep(result, []))
            batch = planned.batch if result is not None else batch
            result, self.stats = None, planned.stats
            if planned.plan is not None:
                self._launch(planned.plan, now_s)
            if planned.plan is None or len(self._pending) == DEPTH:
                return batch, self._pending[0][0] if self._pending else None

    async def report(self) -> PrefixReport | None:
        """Gives what became of its prefixes since the last report, where something did and is noted."""
        if self._changes is None or not len(self._changes):
            return None
        return await self._allocator.address.ask(ReportPrefixes())

    def _launch(self, plan: StepPlan, now_s: float) -> None:
        num_prompt_tokens = len(plan.tokens) // 4
        step_s = self._decode_s[plan.num_decode] + num_prompt_tokens * self._prompt_token_s
        self._free_s = max(self._free_s, now_s) + step_s
        self.busy_s += step_s
        self.num_steps += 1
        tokens = Ints(self._tokens[: 4 * plan.samples.count(1)])
        self._pending.append((self._free_s, StepResult(plan.step, tokens)))
