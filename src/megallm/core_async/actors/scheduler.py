"""The scheduler: owner of the requests. Says what each step computes and what its result meant."""

from array import array
from collections import deque
from typing import ClassVar, assert_never

import anyio

from megallm.core_async.errors import EngineBusy
from megallm.core_async.kit.actor import Actor, Address, Refusal
from megallm.core_async.kit.gate import Gate
from megallm.core_async.messages import (
    AdmitHeld,
    BlockGrant,
    EngineStats,
    FinishAll,
    Finished,
    Floats,
    HoldNew,
    Ints,
    NewRequest,
    NextStep,
    Planned,
    PreemptAll,
    RequestId,
    ReserveBlocks,
    Row,
    ScoredChunk,
    SetEpoch,
    StepPlan,
    StepResult,
    Submit,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.policy import Choice, Limits, choose
from megallm.core_async.plan.request import NO_ROW, Request

type SchedulerMessage = Submit | NextStep | PreemptAll | FinishAll | HoldNew | AdmitHeld | SetEpoch


class Scheduler(Actor[SchedulerMessage]):
    """Owns every request from submission to its last token, and the rows of the batch."""

    name: ClassVar[str] = "scheduler"
    capacity: ClassVar[int] = 4096
    """Submissions of one turn of the loop, one message each; the engine refuses more as EngineBusy."""

    def __init__(
        self,
        limits: Limits,
        allocator: Address[ReserveBlocks],
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
        self._waiting: deque[Request] = deque()
        self._held: deque[Request] | None = None
        """Requests kept aside while a pause waits for the others; None while none is to be."""
        self._running: list[Request] = []
        """In order of admission."""
        self._in_flight: deque[_InFlight] = deque()
        """Plans whose results are to come, oldest first."""
        self._free_rows = [Row(row) for row in reversed(range(limits.max_requests))]
        self._requests_by_row: dict[Row, Request] = {}
        self._released: list[Row] = []
        """Rows given up since the allocator was last asked."""
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._num_steps = 0
        self._num_admissions = 0
        self._num_preemptions = 0
        self._num_prefill_tokens = 0
        self._epoch: int | None = None

    async def handle(self, message: SchedulerMessage) -> object:
        """See the messages."""
        match message:
            case NextStep(result, closed, may_plan):
                return await self._next_step(result, closed, may_plan=may_plan)
            case Submit(requests):
                return self._submit(requests)
            case PreemptAll():
                return await self._preempt_all()
            case FinishAll(finish_reason):
                return await self._finish_all(finish_reason)
            case HoldNew():
                self._held = deque() if self._held is None else self._held
                return None
            case AdmitHeld():
                return self._admit_held()
            case SetEpoch(epoch):
                return self._set_epoch(epoch)
            case _:
                assert_never(message)

    # ---- requests in ---------------------------------------------------------------------------

    def _submit(self, requests: list[NewRequest]) -> None:
        queue = self._waiting if self._held is None else self._held
        room = self._max_waiting - len(queue)
        if len(requests) > room:
            message = f"{len(requests)} requests came and {room} more may wait, of {self._max_waiting}"
            raise Refusal(EngineBusy(f"{message}; try again later"))
        for new in requests:
            request = Request(new, self._epoch)
            self._requests[request.request_id] = request
            queue.append(request)
        self._gate.need()

    def _admit_held(self) -> None:
        self._waiting.extend(self._held or ())
        self._held = None
        self._gate.need()

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for request in self._requests.values():
            request.mark_epoch(epoch)

    # ---- one step ------------------------------------------------------------------------------

    async def _next_step(
        self, result: StepResult | None, closed: list[RequestId], *, may_plan: bool
    ) -> Planned:
        outcome = _Outcome()
        if result is not None:
            self._apply(result, outcome)
        if closed:
            self._drop(closed, outcome)
        if outcome.finished:
            self._forget(outcome)
        plan = await self._plan() if may_plan else None
        if plan is None and self._released:
            await self._reserve([], [], 0)
        batch = outcome.batch() if result is not None or outcome.finished else None
        return Planned(plan, batch, self._stats())

    def _apply(self, result: StepResult, outcome: "_Outcome") -> None:
        """Appends a result's tokens to their requests, and ends those that are complete."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"result of step {result.step} came, step {step.number} was next"
        tokens = unpack_ints(result.tokens)
        assert len(tokens) == len(step.sampled), (
            f"{len(tokens)} tokens came for {len(step.sampled)} sampling rows"
        )
        outcome.started.extend(request.new.text for request in step.firsts if request.finish_reason is None)
        if step.scored:
            outcome.scored = step.scores_of(result)
        stale: list[int] = []
        for index, (request, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if request.finish_reason is not None:
                stale.append(index)
                continue
            request.tokens.append(token)
            if token in request.stop_ids:
                self._finish(request, "stop", token, outcome)
            elif len(request.tokens) >= request.max_tokens:
                self._finish(request, "length", None, outcome)
        outcome.requests = [request.request_id for request in step.sampled]
        outcome.tokens, outcome.log_probs, outcome.top = result.tokens, result.log_probs, result.top
        if stale:
            outcome.leave_out(stale)
        for request in step.complete:
            if request.finish_reason is None:
                self._finish(request, "length", None, outcome)

    def _drop(self, closed: list[RequestId], outcome: "_Outcome") -> None:
        """Ends requests whose readers left; an id that is not known has ended before."""
        for request_id in closed:
            request = self._requests.get(request_id)
            if request is not None and request.finish_reason is None:
                self._finish(request, "abort", None, outcome)

    def _finish(self, request: Request, reason: str, stop_reason: int | None, outcome: "_Outcome") -> None:
        request.finish_reason = reason
        outcome.finished.append(request.finished(reason, stop_reason))
        if request.row != NO_ROW:
            self._release_row(request)
        else:
            outcome.has_finished_waiting = True
        del self._requests[request.request_id]

    def _forget(self, outcome: "_Outcome") -> None:
        """Takes finished requests out of the lists: one pass a step, however many they are."""
        self._running = [request for request in self._running if request.finish_reason is None]
        if outcome.has_finished_waiting:
            self._waiting = deque(request for request in self._waiting if request.finish_reason is None)
            if self._held is not None:
                self._held = deque(request for request in self._held if request.finish_reason is None)

    def _release_row(self, request: Request) -> None:
        """Takes the row back. Steps in flight may still write to its blocks; they run before later ones."""
        del self._requests_by_row[request.row]
        self._released.append(request.row)
        self._free_rows.append(request.row)
        request.leave_row()

    # ---- planning ------------------------------------------------------------------------------

    async def _plan(self) -> StepPlan | None:
        choice = choose(self._running, self._waiting, self._limits)
        if not (choice.decodes or choice.chunks or choice.admissions):
            return None
        changes = await self._settle(choice)
        if not (choice.decodes or choice.chunks):
            return None
        return self._commit(choice, changes)

    async def _settle(self, choice: Choice) -> BlockGrant | None:
        """Reserves the blocks a choice needs; what did not get any is out of the choice afterwards."""
        growing = [request for request in choice.decodes if request.num_computed >= request.capacity]
        growing += [
            request for request, length in choice.chunks if request.num_computed + length > request.capacity
        ]
        if not (growing or choice.admissions or self._released):
            return None
        growing.sort(key=_order)
        lengths = dict(choice.chunks)
        rows = [request.row for request in growing]
        num_tokens = [request.num_computed + lengths.get(request, 1) for request in growing]
        candidates = self._free_rows[: -len(choice.admissions) - 1 : -1]
        rows += candidates
        num_tokens += [length for _, length in choice.admissions]
        grant = await self._reserve(rows, num_tokens, len(growing))
        if grant.preempted:
            self._preempt(grant.preempted, choice)
        self._admit(choice, grant.num_admitted)
        for row, count in zip(grant.changed_rows, grant.changed_counts, strict=True):
            self._requests_by_row[row].capacity += count * self._limits.block_size
        return grant

    async def _reserve(self, rows: list[Row], num_tokens: list[int], num_running: int) -> BlockGrant:
        released, self._released = self._released, []
        victims = [request.row for request in self._running] if rows else []
        grant = await self._allocator.ask(ReserveBlocks(released, rows, num_tokens, num_running, victims))
        self._num_free = grant.num_free
        return grant

    def _preempt(self, rows: list[Row], choice: Choice) -> None:
        """Sends the rows' requests back to the head of the queue, the longest admitted first."""
        yielded = {self._requests_by_row[row] for row in rows}
        for request in sorted(yielded, key=_order, reverse=True):
            self._free_rows.append(request.row)
            del self._requests_by_row[request.row]
            request.leave_row()
            request.num_preemptions += 1
            self._waiting.appendleft(request)
        self._num_preemptions += len(yielded)
        self._running = [request for request in self._running if request not in yielded]
        choice.decodes = [request for request in choice.decodes if request not in yielded]
        choice.chunks = [chunk for chunk in choice.chunks if chunk[0] not in yielded]

    def _admit(self, choice: Choice, num_admitted: int) -> None:
        """Gives rows to the first of the admissions; they run from now on."""
        for request, length in choice.admissions[:num_admitted]:
            waiting = self._waiting.popleft()
            assert waiting is request, f"request {request.request_id} is not the head of the queue"
            self._num_admissions += 1
            request.take_row(self._free_rows.pop(), self._num_admissions, self._epoch)
            self._requests_by_row[request.row] = request
            self._running.append(request)
            choice.chunks.append((request, length))
            choice.admitted.append(request)

    def _commit(self, choice: Choice, grant: BlockGrant | None) -> StepPlan:
        """Counts the chosen tokens as computed and writes the plan."""
        decodes = choice.decodes
        rows = [request.row for request in decodes]
        starts = [request.num_computed for request in decodes]
        lengths = [1] * len(decodes)
        samples = bytearray(b"\1" * len(decodes))
        tokens, targets = array("i"), array("i")
        scored = bytearray(len(decodes))
        step = _InFlight(self._num_steps + 1, decodes.copy())
        for request in decodes:
            request.num_computed += 1
            request.num_tokens += 1
        for request, length in choice.chunks:
            start = request.num_computed
            rows.append(request.row)
            starts.append(start)
            lengths.append(length)
            tokens += request.tokens[start : start + length]
            request.num_computed += length
            is_scored = request.num_scored < request.num_prompt and start + 1 < request.num_prompt
            scored.append(is_scored)
            if is_scored:
                targets += step.score(request, start, length)
            is_complete = request.num_computed == request.num_tokens
            is_sampling = is_complete and request.num_tokens < request.max_tokens
            samples.append(is_sampling)
            if is_sampling:
                step.sample(request)
            elif is_complete:
                step.complete.append(request)
        self._num_steps += 1
        self._num_prefill_tokens += len(tokens)
        self._in_flight.append(step)
        return StepPlan(
            step=self._num_steps,
            num_decode=len(decodes),
            rows=pack_ints(rows),
            starts=pack_ints(starts),
            lengths=pack_ints(lengths),
            samples=bytes(samples),
            tokens=pack_ints(tokens),
            new_rows=[request.setup() for request in choice.admitted],
            changed_rows=pack_ints(grant.changed_rows if grant else []),
            changed_starts=pack_ints(grant.changed_starts if grant else []),
            changed_counts=pack_ints(grant.changed_counts if grant else []),
            blocks=pack_ints(grant.blocks if grant else []),
            scored=bytes(scored) if targets else b"",
            targets=pack_ints(targets),
        )

    # ---- all at once ---------------------------------------------------------------------------

    async def _preempt_all(self) -> None:
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        self._released += [request.row for request in self._running]
        self._preempt([request.row for request in self._running], Choice([], [], [], []))
        await self._reserve([], [], 0)

    async def _finish_all(self, reason: str) -> TokenBatch:
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        outcome = _Outcome()
        for request in list(self._requests.values()):
            if not request.has_started:
                outcome.started.append(request.new.text)
            self._finish(request, reason, None, outcome)
        self._forget(outcome)
        await self._reserve([], [], 0)
        return outcome.batch()

    def _stats(self) -> EngineStats:
        return EngineStats(
            step=self._num_steps,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._held or ()),
            used_blocks=self._num_blocks - self._num_free,
            free_blocks=self._num_free,
            preemptions=self._num_preemptions,
            prefill_tokens=self._num_prefill_tokens,
        )


class _InFlight:
    """A plan whose result is to come, and whom the result concerns, in batch order."""

    __slots__ = ("complete", "firsts", "number", "sampled", "scored")

    def __init__(self, number: int, sampled: list[Request]) -> None:
        self.number = number
        self.sampled = sampled
        self.firsts: list[Request] = []
        """Those of whom the detokeniser has not heard."""
        self.complete: list[Request] = []
        """Those that end with this step although they sample nothing: prompts that are only scored."""
        self.scored: list[tuple[Request, int]] = []
        """Whose prompt is scored, and how many of its tokens."""

    def sample(self, request: Request) -> None:
        """Counts the token that the request samples in this step."""
        request.num_tokens += 1
        request.is_decoding = True
        self.sampled.append(request)
        self._introduce(request)

    def score(self, request: Request, start: int, length: int) -> array[int]:
        """Gives the targets of a chunk and counts them as reported."""
        targets = request.targets(start, length)
        num_wanted = len(targets) - targets.count(-1)
        request.num_scored += num_wanted
        self.scored.append((request, num_wanted))
        self._introduce(request)
        return targets

    def scores_of(self, result: StepResult) -> list[ScoredChunk]:
        """Gives each request its part of the scores."""
        chunks: list[ScoredChunk] = []
        place = 0
        for request, num_wanted in self.scored:
            end = place + num_wanted
            top = None if result.score_top is None else _places(result.score_top, list(range(place, end)))
            chunks.append(ScoredChunk(request.request_id, Floats(result.scores[4 * place : 4 * end]), top))
            place = end
        return chunks

    def _introduce(self, request: Request) -> None:
        if not request.has_started:
            request.has_started = True
            self.firsts.append(request)


class _Outcome:
    """What one result meant, gathered until the reply is written."""

    def __init__(self) -> None:
        self.started: list[TextSpec] = []
        self.requests: list[RequestId] = []
        self.tokens = Ints(b"")
        self.log_probs = Floats(b"")
        self.top: TopLogProbs | None = None
        self.scored: list[ScoredChunk] = []
        self.finished: list[Finished] = []
        self.has_finished_waiting = False

    def leave_out(self, indices: list[int]) -> None:
        """Drops the tokens of requests that had ended before the result came."""
        stale = set(indices)
        kept = [index for index in range(len(self.requests)) if index not in stale]
        tokens = unpack_ints(self.tokens)
        self.tokens = pack_ints([tokens[index] for index in kept])
        if self.log_probs:
            log_probs = unpack_floats(self.log_probs)
            self.log_probs = pack_floats([log_probs[index] for index in kept])
        if self.top is not None:
            self.top = _places(self.top, kept)
        self.requests = [self.requests[index] for index in kept]

    def batch(self) -> TokenBatch:
        """Gives the message for the detokeniser."""
        return TokenBatch(
            started=self.started,
            requests=self.requests,
            tokens=self.tokens,
            log_probs=self.log_probs,
            finished=self.finished,
            time_s=anyio.current_time(),
            top=self.top,
            scored=self.scored,
        )


def _places(top: TopLogProbs, places: list[int]) -> TopLogProbs:
    """Gives some places of a table of likeliest tokens."""
    width = 4 * top.num_top
    return TopLogProbs(
        top.num_top,
        Ints(b"".join(top.ids[place * width : (place + 1) * width] for place in places)),
        Floats(b"".join(top.log_probs[place * width : (place + 1) * width] for place in places)),
    )


def _order(request: Request) -> int:
    return request.order
