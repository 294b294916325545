"""The scheduler: owner of the requests. Says what each step computes and what its result meant."""

from bisect import insort
from collections import deque
from typing import ClassVar, assert_never

import anyio

from megallm.core_async.errors import EngineBusy
from megallm.core_async.kit.actor import Actor, Address, Refusal
from megallm.core_async.kit.gate import Gate
from megallm.core_async.messages import (
    Admission,
    AdmitHeld,
    BlockGrant,
    EngineStats,
    FilledBlock,
    FinishAll,
    ForgetPrefixes,
    HoldNew,
    NewRequest,
    NextStep,
    Planned,
    PreemptAll,
    RequestId,
    ReserveBlocks,
    Row,
    SetEpoch,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
    unpack_ints,
)
from megallm.core_async.plan.flight import InFlight, Outcome
from megallm.core_async.plan.policy import Choice, Limits, candidates, choose
from megallm.core_async.plan.request import NO_ROW, Request
from megallm.core_async.plan.waiting_line import WaitingLine
from megallm.core_async.plan.writing import write_plan

MAX_OFFERED = 128
"""How many of the waiting line the allocator is offered at once."""
MIN_OFFERED = 8
"""The same while nobody fits."""

type SchedulerMessage = Submit | NextStep | PreemptAll | FinishAll | HoldNew | AdmitHeld | SetEpoch


class Scheduler(Actor[SchedulerMessage]):
    """Owns every request from submission to its last token, and the rows of the batch."""

    name: ClassVar[str] = "scheduler"
    capacity: ClassVar[int] = 4096
    """Submissions of one turn of the loop, one message each; the engine refuses more as EngineBusy."""

    def __init__(
        self,
        limits: Limits,
        allocator: Address[ReserveBlocks | ForgetPrefixes],
        gate: Gate,
        *,
        num_blocks: int,
        max_waiting: int,
    ) -> None:
        super().__init__()
        self._limits = limits
        self._allocator = allocator
        self._gate = gate
        self._max_waiting = max_waiting
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingLine()
        self._held: list[Request] | None = None
        """Requests kept aside while a pause waits for the others; None while none is to be."""
        self._running: list[Request] = []
        """In order of precedence."""
        self._in_flight: deque[InFlight] = deque()
        """Plans whose results are to come, oldest first."""
        self._free_rows = [Row(row) for row in reversed(range(limits.max_requests))]
        self._requests_by_row: dict[Row, Request] = {}
        self._released: list[Row] = []
        """Rows given up since the allocator was last asked."""
        self._filled: list[FilledBlock] = []
        """Blocks filled since then."""
        self._num_offered = MAX_OFFERED
        """How many of the waiting line the allocator is offered next."""
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._num_steps = 0
        self._num_admissions = 0
        self._num_preemptions = 0
        self._num_prefill_tokens = 0
        self._num_cached_tokens = 0
        self._num_sought_tokens = 0
        self._num_cached_blocks = 0
        self._epoch: int | None = None

    async def handle(self, message: SchedulerMessage) -> object:
        """See the messages."""
        match message:
            case NextStep(result, closed, may_plan):
                return await self._next_step(result, closed, may_plan=may_plan)
            case Submit(requests):
                self._submit(requests)
            case PreemptAll():
                await self._preempt_all()
            case FinishAll(finish_reason):
                return await self._finish_all(finish_reason)
            case HoldNew():
                self._held = self._held or []
            case AdmitHeld():
                self._admit_held()
            case SetEpoch(epoch):
                await self._set_epoch(epoch)
            case _:
                assert_never(message)
        return None

    # ---- requests in ---------------------------------------------------------------------------

    def _submit(self, requests: list[NewRequest]) -> None:
        num_waiting = len(self._waiting) + len(self._held or ())
        room = self._max_waiting - num_waiting
        if len(requests) > room:
            message = f"{len(requests)} requests came and {room} more may wait, of {self._max_waiting}"
            raise Refusal(EngineBusy(f"{message}; try again later"))
        for new in requests:
            request = Request(new, self._epoch, shares_prefix=self._limits.shares_prefixes)
            self._requests[request.request_id] = request
            if self._held is None:
                self._waiting.append(request)
            else:
                self._held.append(request)
        self._num_offered = MAX_OFFERED
        self._gate.need()

    def _admit_held(self) -> None:
        for request in self._held or ():
            self._waiting.append(request)
        self._held = None
        self._gate.need()

    async def _set_epoch(self, epoch: int) -> None:
        """Marks every request, and makes sure that no key or value of the old weights is shared."""
        self._epoch = epoch
        for request in self._requests.values():
            request.mark_epoch(epoch)
        await self._reserve(ReserveBlocks(self._filled, self._released, [], [], [], [], 0))
        await self._allocator.ask(ForgetPrefixes())

    # ---- one step ------------------------------------------------------------------------------

    async def _next_step(
        self, result: StepResult | None, closed: list[RequestId], *, may_plan: bool
    ) -> Planned:
        outcome = Outcome()
        if result is not None:
            self._apply(result, outcome)
        for request_id in closed:  # one that is not known has ended before
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request, "abort", None, outcome)
        if outcome.finished:
            self._running = [request for request in self._running if request.finish_reason is None]
            self._num_offered = MAX_OFFERED
        plan = await self._plan() if may_plan else None
        if plan is None and self._released:
            await self._reserve(ReserveBlocks(self._filled, self._released, [], [], [], [], 0))
        has_news = result is not None or outcome.finished
        return Planned(plan, outcome.batch(anyio.current_time()) if has_news else None, self._stats())

    def _apply(self, result: StepResult, outcome: Outcome) -> None:
        """Appends a result's tokens to their requests, and ends those that are complete."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"result of step {result.step} came, step {step.number} was next"
        tokens = unpack_ints(result.tokens)
        assert len(tokens) == len(step.sampled), f"{len(tokens)} tokens, {len(step.sampled)} sampling rows"
        outcome.take(step, result)
        stale: list[int] = []
        for index, (request, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if request.finish_reason is not None:
                stale.append(index)
                continue
            request.tokens.append(token)
            if request.shares_prefix and request.row != NO_ROW:
                self._filled += request.newly_filled(self._limits.block_size)
            if token in request.stop_ids:
                self._finish(request, "stop", token, outcome)
            elif len(request.tokens) >= request.max_tokens:
                self._finish(request, "length", None, outcome)
        if stale:
            outcome.leave_out(stale)
        for request in step.complete:
            if request.finish_reason is None:
                self._finish(request, "length", None, outcome)

    def _finish(self, request: Request, reason: str, stop_reason: int | None, outcome: Outcome) -> None:
        request.finish_reason = reason
        outcome.finished.append(request.finished(reason, stop_reason))
        del self._requests[request.request_id]
        if request.row != NO_ROW:
            self._released.append(request.row)
            self._take_row_from(request)
        elif request.ticket:
            self._waiting.leave(request)
        elif self._held is not None:
            self._held = [held for held in self._held if held is not request]

    def _take_row_from(self, request: Request) -> None:
        """Frees a row. Steps in flight may still write to its blocks; they run before later ones."""
        del self._requests_by_row[request.row]
        self._free_rows.append(request.row)
        request.leave_row()

    # ---- planning ------------------------------------------------------------------------------

    async def _plan(self) -> StepPlan | None:
        choice = choose(self._running, self._limits)
        grant = await self._settle(choice)
        if not (choice.decodes or choice.chunks):
            return None
        self._num_steps += 1
        step = InFlight(self._num_steps)
        plan = write_plan(step, choice, grant)
        self._in_flight.append(step)
        self._num_prefill_tokens += len(plan.tokens) // 4
        if self._limits.shares_prefixes:
            for request, _ in choice.chunks:
                self._filled += request.newly_filled(self._limits.block_size)
        return plan

    async def _settle(self, choice: Choice) -> BlockGrant | None:
        """Reserves the blocks a choice needs, and admits; what got none is out of the choice afterwards."""
        growing = [request for request in choice.decodes if request.num_computed >= request.capacity]
        growing += [
            request for request, length in choice.chunks if request.num_computed + length > request.capacity
        ]
        offered = self._offer(choice)
        if not (growing or offered or self._released):
            return None
        growing.sort(key=_precedence)
        lengths = dict(choice.chunks)
        grant = await self._reserve(
            ReserveBlocks(
                filled=self._filled,
                released=self._released,
                rows=[request.row for request in growing],
                num_tokens=[request.num_computed + lengths.get(request, 1) for request in growing],
                victims=[request.row for request in self._running] if growing or offered else [],
                admissions=[admission for _, admission in offered],
                budget=choice.budget,
            )
        )
        if grant.preempted or grant.held:
            self._leave_out(grant, choice)
        self._admit(grant, offered, choice)
        for row, start, count in zip(
            grant.changed_rows, grant.changed_starts, grant.changed_counts, strict=True
        ):
            self._requests_by_row[row].capacity = (start + count) * self._limits.block_size
        return grant

    def _offer(self, choice: Choice) -> list[tuple[Request, Admission]]:
        """Gives who might be admitted; few while the line's head does not fit, since they are tried each step."""
        if not self._free_rows or choice.budget <= 0 or not len(self._waiting):
            return []
        rows = self._free_rows[: -self._num_offered - 1 : -1]
        return candidates(self._waiting, rows, self._limits, self._num_offered)

    async def _reserve(self, wish: ReserveBlocks) -> BlockGrant:
        self._filled, self._released = [], []
        grant = await self._allocator.ask(wish)
        self._num_free = grant.num_free
        self._num_cached_blocks = grant.num_cached_blocks
        return grant

    def _leave_out(self, grant: BlockGrant, choice: Choice) -> None:
        """Takes those that yielded, or sit out, from the choice; the former wait at the head of the line."""
        yielded = {self._requests_by_row[row] for row in grant.preempted}
        out = yielded | {self._requests_by_row[row] for row in grant.held}
        choice.decodes = [request for request in choice.decodes if request not in out]
        choice.chunks = [chunk for chunk in choice.chunks if chunk[0] not in out]
        for request in sorted(yielded, key=_precedence, reverse=True):
            self._take_row_from(request)
            request.num_preemptions += 1
            self._waiting.put_back(request)
        self._num_preemptions += len(yielded)
        self._running = [request for request in self._running if request not in yielded]

    def _admit(self, grant: BlockGrant, offered: list[tuple[Request, Admission]], choice: Choice) -> None:
        """Makes those run that the allocator admitted."""
        for index, num_cached, num_chunk in zip(
            grant.admitted, grant.num_cached, grant.num_chunk, strict=True
        ):
            request, admission = offered[index]
            self._waiting.leave(request)
            self._free_rows.remove(admission.row)
            self._num_admissions += 1
            request.take_row(admission.row, self._num_admissions, self._epoch)
            request.reuse(num_cached, self._limits.block_size)
            self._num_cached_tokens += num_cached
            self._num_sought_tokens += request.num_tokens
            self._requests_by_row[request.row] = request
            insort(self._running, request, key=_precedence)
            choice.chunks.append((request, num_chunk))
            choice.admitted.append(request)
        if grant.admitted:
            admitted = set(grant.admitted)
            for index in range(grant.admitted[-1]):
                offered[index][0].num_passed += index not in admitted
        if offered:
            self._num_offered = MAX_OFFERED if grant.admitted else MIN_OFFERED

    # ---- all at once ---------------------------------------------------------------------------

    async def _preempt_all(self) -> None:
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        self._released += [request.row for request in self._running]
        for request in reversed(self._running):
            self._take_row_from(request)
            request.num_preemptions += 1
            self._waiting.put_back(request)
        self._num_preemptions += len(self._running)
        self._running = []
        self._filled = []
        await self._reserve(ReserveBlocks([], self._released, [], [], [], [], 0))
        await self._allocator.ask(ForgetPrefixes())

    async def _finish_all(self, reason: str) -> TokenBatch:
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        outcome = Outcome()
        for request in list(self._requests.values()):
            if not request.has_started:
                outcome.started.append(request.new.text)
            self._finish(request, reason, None, outcome)
        self._running = []
        await self._reserve(ReserveBlocks(self._filled, self._released, [], [], [], [], 0))
        return outcome.batch(anyio.current_time())

    def _stats(self) -> EngineStats:
        return EngineStats(
            step=self._num_steps,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._held or ()),
            used_blocks=self._num_blocks - self._num_free - self._num_cached_blocks,
            cached_blocks=self._num_cached_blocks,
            free_blocks=self._num_free,
            prefix_hit_rate=self._num_cached_tokens / max(self._num_sought_tokens, 1),
            preemptions=self._num_preemptions,
            prefill_tokens=self._num_prefill_tokens,
        )


def _precedence(request: Request) -> tuple[int, int]:
    return request.priority, request.order
