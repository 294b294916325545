"""A scheduler and its allocator, driven by hand as the engine's pump drives them, and the books beside."""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megallm.core_async.actors.allocator import Allocator
from megallm.core_async.actors.scheduler import Scheduler
from megallm.core_async.kit.gate import Gate
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    AdmitHeld,
    BlockCounts,
    CountBlocks,
    EngineStats,
    Finished,
    NewRequest,
    NextStep,
    PreemptAll,
    RequestId,
    Row,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.policy import MAX_PASSES, Limits
from megallm.core_async.plan.roster import Roster
from megallm.core_async.protocols import PendingStep
from tests.fakes import FakeRunner, continuation, likeliest, log_prob

DEPTH = 2
"""Plans in flight, as in the engine."""
MANY_TURNS = 3000
"""More than any example here takes: who needs more makes no progress."""


@dataclass(frozen=True)
class Prompt:
    """A request as a test writes it."""

    tokens: tuple[int, ...]
    num_new: int = 4
    stop_ids: tuple[int, ...] = ()
    min_new: int = 0
    scores: bool = False
    wants_log_probs: bool = False
    num_top: int = 0
    priority: int = 0
    salt: str = ""
    is_fork: bool = False

    def request(self, request_id: RequestId) -> NewRequest:
        """Gives it as the scheduler takes it; its seed tells whose a row is."""
        return NewRequest(
            request_id=request_id,
            prompt=pack_ints(self.tokens),
            max_new_tokens=self.num_new,
            stop_token_ids=self.stop_ids,
            sampling=Sampling(
                temperature=0.0, seed=request_id, wants_log_probs=self.wants_log_probs, num_top=self.num_top
            ),
            text=TextSpec(request_id),
            min_new_tokens=self.min_new,
            scores_prompt=self.scores,
            priority=self.priority,
            salt=self.salt,
            shares_prefix=self.is_fork,
        )

    @property
    def output(self) -> list[int]:
        """What the fake model gives for it when nothing cuts it short."""
        return continuation(self.tokens, self.num_new, self.stop_ids, self.min_new)


@dataclass
class Account:
    """What has been reported of one request."""

    prompt: Prompt
    is_started: bool = False
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    scores: list[float] = field(default_factory=list[float])
    score_top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    ending: Finished | None = None
    num_admissions: int = 0
    num_passes: int = 0
    """Others behind it that were admitted while it had never been."""
    is_held: bool = False

    def check(self, cut_short: str | None = None) -> None:
        """Fails unless the whole output was reported, or, where it was cut short, a beginning of it."""
        prompt, ending = self.prompt, self.ending
        assert ending is not None, f"{prompt} never ended"
        known = [*prompt.tokens, *self.tokens]
        if ending.finish_reason == cut_short:
            assert self.tokens == prompt.output[: len(self.tokens)]
            assert len(self.tokens) < max(1, prompt.num_new)
            num_scores = len(self.scores)
        else:
            assert self.tokens == prompt.output
            is_stopped = bool(self.tokens) and self.tokens[-1] in prompt.stop_ids
            assert ending.finish_reason == ("stop" if is_stopped else "length")
            assert ending.stop_reason == (self.tokens[-1] if is_stopped else None)
            num_scores = len(prompt.tokens) - 1 if prompt.scores else 0
        places = range(len(prompt.tokens), len(known))
        if prompt.wants_log_probs:
            assert self.log_probs == [log_prob(known[:place], known[place]) for place in places]
        if prompt.wants_log_probs and prompt.num_top:
            assert self.top == [likeliest(known[:place], prompt.num_top) for place in places]
        assert ending.num_preemptions >= self.num_admissions - 1
        assert 0 <= ending.num_cached_tokens < len(known)
        scored = range(1, num_scores + 1)
        if prompt.scores and prompt.num_top and prompt.wants_log_probs:
            assert self.score_top == [likeliest(known[:place], prompt.num_top) for place in scored]
        assert self.scores == [log_prob(known[:place], known[place]) for place in scored]


class Pump:
    """Asks for steps, runs them on the fake model, and keeps an account of each request."""

    def __init__(self, limits: Limits, pool: BlockPool, max_waiting: int) -> None:
        self.limits = limits
        self.gate = Gate()
        self.pool = pool
        self.allocator = Allocator(self.pool)
        roster = Roster(limits, num_blocks=pool.num_blocks, max_waiting=max_waiting)
        self.scheduler = Scheduler(roster, self.allocator.address, self.gate)
        self.runner = FakeRunner(
            num_blocks=pool.num_blocks, block_size=limits.block_size, max_requests=limits.max_requests
        )
        self.accounts: dict[RequestId, Account] = {}
        self.closed: list[RequestId] = []
        self.plans: list[StepPlan] = []
        self.stats = EngineStats()
        self.holds_new = False
        self._pending: deque[PendingStep] = deque()
        self._result: StepResult | None = None
        self._computed: dict[Row, int] = {}
        self._owners: dict[Row, RequestId] = {}

    @property
    def num_in_flight(self) -> int:
        """Plans whose results were not collected."""
        return len(self._pending)

    async def submit(self, *prompts: Prompt) -> list[Account]:
        """Queues prompts as one submission; ids count up from 1."""
        first = len(self.accounts) + 1
        accounts = {RequestId(first + place): Account(prompt) for place, prompt in enumerate(prompts)}
        requests = [account.prompt.request(request_id) for request_id, account in accounts.items()]
        await self.scheduler.address.ask(Submit(requests))
        for account in accounts.values():
            account.is_held = self.holds_new
        self.accounts |= accounts
        return list(accounts.values())

    async def admit_held(self) -> None:
        """Queues what was held."""
        await self.scheduler.address.ask(AdmitHeld())
        self.holds_new = False
        for account in self.accounts.values():
            account.is_held = False

    async def turn(self, *, may_plan: bool = True) -> bool:
        """Goes once round the pump's loop; False when it would go to sleep."""
        closed, self.closed = self.closed, []
        planned = await self.scheduler.address.ask(NextStep(self._result, closed, may_plan))
        self._result = None
        self.stats = planned.stats
        if planned.batch is not None:
            self.enter(planned.batch)
        if planned.plan is not None:
            assert may_plan
            self._check(planned.plan)
            self.plans.append(planned.plan)
            self._pending.append(self.runner.launch(planned.plan))
        self.pool.check()
        stats, pool = self.stats, self.pool
        counted = (stats.free_blocks, stats.cached_blocks, stats.used_blocks)
        assert counted == (pool.num_free, pool.num_cached, pool.num_used)
        if planned.plan is None and not self._pending:
            return False
        assert len(self._pending) <= DEPTH
        if planned.plan is None or len(self._pending) == DEPTH:
            self._result = self._pending.popleft().result()
        return True

    async def run(self, *, may_plan: bool = True) -> None:
        """Goes on until there is nothing to do."""
        for _ in range(MANY_TURNS):
            if not await self.turn(may_plan=may_plan):
                return
        raise AssertionError(f"still busy after {MANY_TURNS} turns: {self.stats}")

    async def count_blocks(self) -> BlockCounts:
        """Asks the allocator."""
        return await self.allocator.address.ask(CountBlocks())

    async def check_all_free(self) -> None:
        """Fails unless nobody holds a block or a row: as many requests as fit run at once."""
        counts = await self.count_blocks()
        assert (counts.num_free + counts.num_cached, counts.num_used) == (counts.num_blocks, 0)
        assert (self.stats.running, self.stats.waiting) == (0, 0)
        many = self.limits.max_requests
        await self.submit(*[Prompt((1,), 1)] * many)
        await self.turn()
        assert self.stats.running == min(many, (counts.num_blocks + 1) // 2), "a block each, and one to grow"
        await self.run()

    async def lose_the_cache(self) -> None:
        """Takes all blocks away and wipes their contents, as a suspend that is to recompute them does."""
        await self.run(may_plan=False)
        await self.scheduler.address.ask(PreemptAll())
        self.runner.release_cache(pack_ints([]))
        self.runner.restore_cache()

    def _check(self, plan: StepPlan) -> None:
        """Fails unless the plan keeps its limits, and each row goes on where it was."""
        rows = [Row(row) for row in unpack_ints(plan.rows)]
        starts, lengths = unpack_ints(plan.starts), unpack_ints(plan.lengths)
        assert 0 < len(rows) == len(set(rows)) <= self.limits.max_requests
        assert min(lengths) > 0
        assert sum(lengths) <= self.limits.max_tokens
        decodes = slice(0, plan.num_decode)
        assert set(lengths[decodes]) <= {1}
        assert set(plan.samples[decodes]) <= {1}
        assert len(unpack_ints(plan.tokens)) == sum(lengths[plan.num_decode :])
        for setup in plan.new_rows:
            self._owners[setup.row] = RequestId(setup.sampling.seed)
            self._admit(RequestId(setup.sampling.seed))
            self._computed.pop(setup.row, None)
        for row, start, count in zip(
            unpack_ints(plan.changed_rows),
            unpack_ints(plan.changed_starts),
            unpack_ints(plan.changed_counts),
            strict=True,
        ):
            prompt = self.accounts[self._owners[Row(row)]].prompt
            num_blocks = -(-(len(prompt.tokens) + prompt.num_new) // self.limits.block_size)
            assert start + count <= num_blocks, f"row {row} has {start + count} blocks, {num_blocks} at most"
        for row, start, length in zip(rows, starts, lengths, strict=True):
            first = start if self.limits.block_size and start % self.limits.block_size == 0 else 0
            assert start == self._computed.get(row, first), f"row {row} goes on at {start}"
            self._computed[row] = start + length

    def _admit(self, request_id: RequestId) -> None:
        """Fails when somebody is admitted that must not be, or others have passed somebody for ever."""
        admitted = self.accounts[request_id]
        assert not admitted.is_held
        assert admitted.ending is None
        admitted.num_admissions += 1
        for other, account in self.accounts.items():
            is_before = (account.prompt.priority, other) < (admitted.prompt.priority, request_id)
            is_new = not account.num_admissions and account.ending is None and not account.is_held
            if is_before and is_new and admitted.num_admissions == 1:
                account.num_passes += 1
                assert account.num_passes <= MAX_PASSES * self.limits.max_requests

    def enter(self, batch: TokenBatch) -> None:
        """Writes a batch into the accounts; nobody is heard of before the start or after the end."""
        for spec in batch.started:
            account = self.accounts[spec.request_id]
            assert not account.is_started
            account.is_started = True
        for chunk in batch.scored:
            account = self._open(chunk.request_id)
            if account is not None:
                account.scores += unpack_floats(chunk.log_probs)
                account.score_top += [place[: account.prompt.num_top] for place in rows_of(chunk.top)]
        tokens = unpack_ints(batch.tokens)
        log_probs = unpack_floats(batch.log_probs) if batch.log_probs else [None] * len(tokens)
        places = rows_of(batch.top) or [None] * len(tokens)
        for request_id, token, value, place in zip(batch.requests, tokens, log_probs, places, strict=True):
            account = self.accounts[request_id]
            assert account.is_started
            assert account.ending is None
            account.tokens.append(token)
            if value is not None:
                account.log_probs.append(value)
            if place is not None:
                account.top.append(place[: account.prompt.num_top])
        for ending in batch.finished:
            account = self.accounts[ending.request_id]
            assert account.ending is None
            account.ending = ending

    def _open(self, request_id: RequestId) -> Account | None:
        account = self.accounts[request_id]
        if account.ending is not None:
            return None
        assert account.is_started
        return account


def rows_of(top: TopLogProbs | None) -> list[list[tuple[int, float]]]:
    """Gives a table of likeliest tokens, a list a place; none where there is no table."""
    if top is None:
        return []
    pairs = list(zip(unpack_ints(top.ids), unpack_floats(top.log_probs), strict=True))
    return [pairs[place : place + top.num_top] for place in range(0, len(pairs), top.num_top)]


def limits(
    *,
    max_tokens: int = 16,
    max_requests: int = 4,
    block_size: int = 4,
    chunks_prompts: bool = False,
    shares_prefixes: bool = False,
) -> Limits:
    """Gives small limits."""
    return Limits(max_tokens, max_requests, block_size, chunks_prompts, shares_prefixes)


@asynccontextmanager
async def pumping(
    bounds: Limits | None = None,
    num_blocks: int = 16,
    *,
    max_waiting: int = 1000,
    keeps_cached: bool = True,
    max_held: int = 0,
) -> AsyncGenerator[Pump]:
    """Runs the actors round a block."""
    bounds = limits() if bounds is None else bounds
    pool = BlockPool(num_blocks, bounds.block_size, keeps_cached=keeps_cached, max_held=max_held)
    pump = Pump(bounds, pool, max_waiting)
    async with Supervisor() as supervisor:
        await supervisor.start("allocator", pump.allocator.run)
        await supervisor.start("scheduler", pump.scheduler.run)
        yield pump
        await supervisor.stop()
