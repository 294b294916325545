"""Who waits, who runs at which row, and what is in flight. Pure; the scheduler is its one owner."""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from megallm.core_async.errors import EngineBusy
from megallm.core_async.messages import (
    Admission,
    BlockGrant,
    EngineStats,
    FilledBlocks,
    NewRequest,
    RequestId,
    ReserveBlocks,
    Row,
    StepPlan,
    StepResult,
    unpack_ints,
)
from megallm.core_async.plan.flight import InFlight, Outcome
from megallm.core_async.plan.policy import Choice, Limits, candidates, choose, look_ahead
from megallm.core_async.plan.request import NO_ROW, Request
from megallm.core_async.plan.tally import Tally
from megallm.core_async.plan.waiting_line import WaitingLine
from megallm.core_async.plan.writing import write_plan

MAX_OFFERED = 128
"""How many of the waiting line the allocator is offered at once."""
MIN_OFFERED = 8
"""The same while nobody fits."""


class Roster:
    """Every request from submission to its last token, and the rows of the batch.

    A step: `choose`, `wish` and what the allocator grants, `settle`, `commit`; later `apply`.
    """

    def __init__(self, limits: Limits, *, num_blocks: int, max_waiting: int) -> None:
        self._limits = limits
        self._max_waiting = max_waiting
        self._requests: dict[RequestId, Request] = {}
        self._shares = limits.shares_prefixes
        """Whether some request's blocks may be shared."""
        self._stop_ids: set[int] = set()
        """Of all requests, and perhaps of some that have ended."""
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
        self._filled: list[FilledBlocks] = []
        """Blocks filled since then."""
        self._sitting_out: set[Row] = set()
        """Rows that the last grant held."""
        self._num_offered = MAX_OFFERED
        """How many of the waiting line the allocator is offered next."""
        self._offered: list[tuple[Request, Admission]] = []
        """Those it was offered last."""
        self._tally = Tally(num_blocks)
        self._epoch: int | None = None

    # ---- requests in ---------------------------------------------------------------------------

    def submit(self, requests: list[NewRequest]) -> None:
        """Queues requests, all of them or none.

        Raises: EngineBusy when there is no room for all.
        """
        room = self._max_waiting - len(self._waiting) - len(self._held or ())
        if len(requests) > room:
            what = f"{len(requests)} requests came and {room} more may wait, of {self._max_waiting}"
            raise EngineBusy(f"{what}; try again later")
        for new in requests:
            request = Request(new, self._epoch, shares_prefix=self._limits.shares_prefixes)
            self._requests[request.request_id] = request
            self._stop_ids.update(new.stop_token_ids)
            self._shares |= request.shares_prefix
            if self._held is None:
                self._waiting.append(request)
            else:
                self._held.append(request)
        self._num_offered = MAX_OFFERED

    def hold_new(self) -> None:
        """Keeps what is submitted from now on aside."""
        self._held = self._held or []

    def admit_held(self) -> None:
        """Queues what was kept aside."""
        for request in self._held or ():
            self._waiting.append(request)
        self._held = None

    def mark_epoch(self, epoch: int) -> None:
        """Notes that the weights have changed. Nothing that is cached so far is to be shared any more."""
        self._epoch = epoch
        self._filled = []
        for request in self._requests.values():
            request.mark_epoch(epoch)

    # ---- results -------------------------------------------------------------------------------

    def apply(self, result: StepResult, outcome: Outcome) -> None:
        """Appends a result's tokens to their requests, and ends those that are complete."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"result of step {result.step} came, step {step.number} was next"
        tokens = unpack_ints(result.tokens)
        assert len(tokens) == len(step.sampled), f"{len(tokens)} tokens, {len(step.sampled)} sampling rows"
        self._tally.num_generated += len(tokens)
        outcome.take(step, result)
        if step.has_stale or result.failed:
            failed = {place for place, _ in result.failed}
            rows = enumerate(step.sampled)
            outcome.keep([at for at, request in rows if request.finish_reason is None and at not in failed])
        # every row at every step: nothing else belongs in here
        for request, token in zip(step.sampled, tokens, strict=True):
            request.tokens.append(token)
        if self._shares:
            self._note_filled(step.sampled)
        self._end_those_done(step, result, tokens, outcome)

    def drop(self, closed: Iterable[RequestId], outcome: Outcome) -> None:
        """Ends requests whose readers left; one that is not known has ended before."""
        for request_id in closed:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request, "abort", None, outcome)

    def forget_finished(self, outcome: Outcome) -> None:
        """Takes those that have ended from the running ones: one pass a step, however many they are."""
        if outcome.finished:
            self._running = [request for request in self._running if request.finish_reason is None]
            self._num_offered = MAX_OFFERED

    def finish_all(self, reason: str) -> Outcome:
        """Ends every request with what it has. No step may be in flight."""
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        outcome = Outcome()
        for request in list(self._requests.values()):
            if not request.has_started:
                outcome.started.append(request.new.text)
            self._finish(request, reason, None, outcome)
        self._running = []
        return outcome

    def preempt_all(self, time_s: float) -> None:
        """Sends every running request back to the line. No step may be in flight."""
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        for request in self._running:
            request.events.append(("evict", time_s))
        self._released += [request.row for request in self._running]
        self._filled = []
        self._put_back(self._running)
        self._running = []

    # ---- one step ------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """Picks the next tokens of those that run."""
        return choose(self._running, self._limits)

    def wish(self, choice: Choice) -> ReserveBlocks | None:
        """Gives what to ask the allocator for; None when the choice needs nothing."""
        ahead = look_ahead(choice, len(self._running), self._tally.num_free, self._limits)
        growing = [request for request in choice.decodes if request.num_computed >= request.capacity]
        if growing and ahead:
            growing = [
                request for request in choice.decodes if request.num_computed + ahead >= request.capacity
            ]
        growing += [
            request for request, length in choice.chunks if request.num_computed + length > request.capacity
        ]
        self._offered = self._offer(choice)
        if not (growing or self._offered or self._released):
            return None
        growing.sort(key=_precedence)
        lengths = dict(choice.chunks)
        filled, released, self._filled, self._released = self._filled, self._released, [], []
        return ReserveBlocks(
            filled=filled,
            released=released,
            rows=[request.row for request in growing],
            num_tokens=[
                min(request.num_computed + lengths.get(request, 1 + ahead), request.max_tokens)
                for request in growing
            ],
            victims=[request.row for request in self._running] if growing or self._offered else [],
            admissions=[admission for _, admission in self._offered],
            budget=choice.budget,
        )

    def give_back(self) -> ReserveBlocks | None:
        """Gives what tells the allocator of rows that were given up; None when there are none."""
        if not self._released:
            return None
        filled, released, self._filled, self._released = self._filled, self._released, [], []
        return ReserveBlocks(filled, released, [], [], [], [], 0)

    def settle(self, choice: Choice, grant: BlockGrant, time_s: float) -> None:
        """Takes a grant: what got no blocks is out of the choice afterwards, what was admitted is in it."""
        self.count(grant)
        for row in grant.preempted:
            self._requests_by_row[row].events.append(("evict", time_s))
        for row in grant.held:
            if row not in self._sitting_out:
                self._requests_by_row[row].events.append(("pause", time_s))
        self._sitting_out = set(grant.held)
        if grant.preempted or grant.held:
            self._leave_out(grant, choice)
        self._admit(grant, self._offered, choice)
        for request in choice.admitted:
            request.events.append(("add_context", time_s))
        changes = zip(grant.changed_rows, grant.changed_starts, grant.changed_counts, strict=True)
        for row, start, count in changes:
            self._requests_by_row[row].capacity = (start + count) * self._limits.block_size

    def count(self, grant: BlockGrant) -> None:
        """Takes the allocator's counts."""
        self._tally.num_free, self._tally.num_cached_blocks = grant.num_free, grant.num_cached_blocks

    def commit(self, choice: Choice, grant: BlockGrant | None) -> StepPlan | None:
        """Writes the plan of a settled choice, which is in flight then; None when it computes nothing."""
        if not (choice.decodes or choice.chunks):
            return None
        self._tally.num_steps += 1
        step = InFlight(self._tally.num_steps)
        plan = write_plan(step, choice, grant)
        self._in_flight.append(step)
        self._tally.num_prefilled += len(plan.tokens) // 4
        if self._shares:
            self._note_filled([request for request, _ in choice.chunks])
        return plan

    def stats(self) -> EngineStats:
        """Gives the counts of now."""
        num_waiting = len(self._waiting) + len(self._held or ())
        return self._tally.stats(running=len(self._running), waiting=num_waiting)

    # ---- below ---------------------------------------------------------------------------------

    def _end_those_done(
        self, step: InFlight, result: StepResult, tokens: Iterable[int], outcome: Outcome
    ) -> None:
        """Ends requests whose token is a stop id, that can't go on, or that have all they may have.

        What they filled is not to be shared: who can't go on may have broken numbers in the cache.
        """
        if result.failed:
            self._filled = []
        for place, reason in result.failed:
            request = step.sampled[place]
            if request.finish_reason is None:
                self._finish(request, "error", reason, outcome)
        if not self._stop_ids.isdisjoint(tokens):
            for request, token in zip(step.sampled, tokens, strict=True):
                if token in request.new.stop_token_ids and request.finish_reason is None:
                    self._finish(request, "stop", token, outcome)
        for request in [*step.last, *step.complete]:
            if request.finish_reason is None:
                self._finish(request, "length", None, outcome)

    def _note_filled(self, requests: list[Request]) -> None:
        """Gathers the blocks that these requests have filled, for others to share."""
        for request in [each for each in requests if len(each.tokens) >= each.fill_at]:
            filled = request.newly_filled(self._limits.block_size)
            if filled is not None:
                self._filled.append(filled)

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None, outcome: Outcome) -> None:
        request.finish_reason = reason
        outcome.finished.append(request.finished(reason, stop_reason))
        del self._requests[request.request_id]
        for step in self._in_flight:
            step.has_stale = True
        if not self._requests:
            self._stop_ids.clear()
        if request.row != NO_ROW:
            self._released.append(request.row)
            self._take_row_from(request)
        elif request.is_waiting:
            self._waiting.leave(request)
        elif self._held is not None:
            self._held = [held for held in self._held if held is not request]

    def _take_row_from(self, request: Request) -> None:
        """Frees a row. Steps in flight may still write to its blocks; they run before later ones."""
        del self._requests_by_row[request.row]
        self._free_rows.append(request.row)
        request.leave_row()

    def _offer(self, choice: Choice) -> list[tuple[Request, Admission]]:
        """Gives who might be admitted; few while nobody fits, since they are tried at each step."""
        if not self._free_rows or choice.budget <= 0 or not len(self._waiting):
            return []
        rows = self._free_rows[: -self._num_offered - 1 : -1]
        return candidates(self._waiting, rows, self._limits, self._num_offered)

    def _leave_out(self, grant: BlockGrant, choice: Choice) -> None:
        """Takes those that yielded, or sit out, from the choice; the former wait at the head of the line."""
        yielded = {self._requests_by_row[row] for row in grant.preempted}
        out = yielded | {self._requests_by_row[row] for row in grant.held}
        choice.decodes = [request for request in choice.decodes if request not in out]
        choice.chunks = [chunk for chunk in choice.chunks if chunk[0] not in out]
        self._put_back(sorted(yielded, key=_precedence))
        self._running = [request for request in self._running if request not in yielded]

    def _admit(self, grant: BlockGrant, offered: list[tuple[Request, Admission]], choice: Choice) -> None:
        """Makes those run that the allocator admitted."""
        admissions = zip(grant.admitted, grant.num_cached, grant.num_chunk, strict=True)
        for index, num_cached, num_chunk in admissions:
            request, admission = offered[index]
            self._waiting.leave(request)
            self._free_rows.remove(admission.row)
            self._tally.admit(request, num_cached)
            request.take_row(admission.row, self._tally.num_admissions, self._epoch)
            request.reuse(num_cached, self._limits.block_size)
            self._requests_by_row[request.row] = request
            insort(self._running, request, key=_precedence)
            choice.chunks.append((request, num_chunk))
            choice.admitted.append(request)
        if grant.admitted:
            left = set(range(grant.admitted[-1])) - set(grant.admitted)
            for index in left:
                offered[index][0].num_passed += sum(other > index for other in grant.admitted)
        if offered:
            self._num_offered = MAX_OFFERED if grant.admitted else MIN_OFFERED

    def _put_back(self, requests: list[Request]) -> None:
        """Sends requests back to the head of the line, in their order; the caller forgets them."""
        for request in reversed(requests):
            self._take_row_from(request)
            request.num_preemptions += 1
            self._waiting.put_back(request)
        self._tally.num_preemptions += len(requests)


def _precedence(request: Request) -> tuple[int, int]:
    return request.priority, request.order
