"""A roster, a watched pool and the fake model, gone round as the engine goes: no actors, no loop."""

from collections import deque
from dataclasses import dataclass, field

from megallm.core_async.messages import (
    Finished,
    NewRequest,
    RequestId,
    ReserveBlocks,
    Row,
    Sampling,
    StepPlan,
    StepResult,
    TextSpec,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.plan.flight import Outcome
from megallm.core_async.plan.policy import Limits
from megallm.core_async.plan.roster import Roster
from megallm.core_async.protocols import PendingStep
from tests.fakes import FakeRunner, continuation
from tests.plan.watched_pool import WatchedPool

DEPTH = 2
"""Plans in flight, as in the engine."""


@dataclass(frozen=True)
class Asked:
    """A request as a test writes it."""

    tokens: tuple[int, ...]
    num_new: int = 4
    priority: int = 0
    salt: str = ""
    is_fork: bool = False
    scores: bool = False


@dataclass
class Course:
    """How a request has fared."""

    asked: Asked
    tokens: list[int] = field(default_factory=list[int])
    ending: Finished | None = None
    is_aborted: bool = False
    num_admissions: int = 0
    num_passes: int = 0
    """Requests that were admitted while it stood before them in the line."""


class Rounds:
    """Goes round; fails at the first plan that breaks a rule."""

    def __init__(self, limits: Limits, pool: WatchedPool) -> None:
        self.limits = limits
        self.pool = pool
        self.roster = Roster(limits, num_blocks=pool.num_blocks, max_waiting=10_000)
        self.runner = FakeRunner(
            num_blocks=pool.num_blocks, block_size=limits.block_size, max_requests=limits.max_requests
        )
        self.courses: dict[RequestId, Course] = {}
        self.num_turns = 0
        self.num_computed = 0
        """Tokens, each as often as it was computed."""
        self._closed: list[RequestId] = []
        self._pending: deque[PendingStep] = deque()
        self._result: StepResult | None = None
        self._next_starts: dict[Row, int] = {}
        self._rows: dict[Row, RequestId] = {}
        self._line: dict[int, list[RequestId]] = {}
        """Who waits, by priority."""

    @property
    def live(self) -> list[RequestId]:
        """Requests that have not ended and were not aborted."""
        return [key for key, course in self.courses.items() if not course.ending and not course.is_aborted]

    def submit(self, *asked: Asked) -> list[Course]:
        """Queues requests; ids count up from 1."""
        keys = [RequestId(len(self.courses) + 1 + place) for place in range(len(asked))]
        self.roster.submit([new_request(key, each) for key, each in zip(keys, asked, strict=True)])
        for key, each in zip(keys, asked, strict=True):
            self.courses[key] = Course(each)
            self._line.setdefault(each.priority, []).append(key)
        return [self.courses[key] for key in keys]

    def abort(self, key: RequestId) -> None:
        """Lets a reader go away."""
        self.courses[key].is_aborted = True
        self._closed.append(key)

    def turn(self, *, may_plan: bool = True) -> bool:
        """Goes round once; False when there was nothing to do."""
        self.num_turns += 1
        outcome = Outcome()
        if self._result is not None:
            self.roster.apply(self._result, outcome)
            self._result = None
        self.roster.drop(self._closed, outcome)
        self._closed = []
        self.roster.forget_finished(outcome)
        self._enter(outcome)
        plan = self._plan() if may_plan else None
        if plan is None:
            self._give_back()
        else:
            self._check(plan)
            self._pending.append(self.runner.launch(plan))
        stats, pool = self.roster.stats(), self.pool
        counted = (stats.free_blocks, stats.cached_blocks, stats.used_blocks)
        assert counted == (pool.num_free, pool.num_cached, pool.num_used)
        if plan is None and not self._pending:
            return False
        if plan is None or len(self._pending) == DEPTH:
            self._result = self._pending.popleft().result()
        return True

    def run(self, *, may_plan: bool = True, most: int = 10_000) -> int:
        """Goes on until there is nothing to do; gives how many turns that took."""
        for num_turns in range(most):
            if not self.turn(may_plan=may_plan):
                return num_turns
        raise AssertionError(f"still busy after {most} turns: {self.roster.stats()}")

    def suspend(self, *, keeps_contents: bool) -> None:
        """Comes to rest and gives the cache's memory back, its contents to host memory or nowhere."""
        self.run(may_plan=False)
        if not keeps_contents:
            self.roster.preempt_all(float(self.num_turns))
            self._put_back(list(self._rows))
            self._forget_prefixes()
        self.runner.release_cache(pack_ints(self.pool.contents() if keeps_contents else []))
        self.runner.restore_cache()

    def mark_epoch(self, epoch: int) -> None:
        """Tells of new weights, between two steps."""
        self.roster.mark_epoch(epoch)
        self._forget_prefixes()

    def check_end(self) -> None:
        """Fails unless each request has all its tokens, or a beginning of them, and nobody holds anything."""
        for key, course in self.courses.items():
            asked, ending = course.asked, course.ending
            assert ending is not None, f"request {key} never ended"
            output = continuation(asked.tokens, asked.num_new)
            if ending.finish_reason == "abort":
                assert course.is_aborted
                assert course.tokens == output[: len(course.tokens)]
            else:
                assert (ending.finish_reason, course.tokens) == ("length", output)
            assert ending.num_preemptions >= course.num_admissions - 1
        stats = self.roster.stats()
        assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)

    # ---- below -----------------------------------------------------------------------------------

    def _plan(self) -> StepPlan | None:
        choice = self.roster.choose()
        wish = self.roster.wish(choice)
        grant = None
        if wish is not None:
            self._check_offer(wish)
            grant = self.pool.reserve(wish)
            self.roster.settle(choice, grant, float(self.num_turns))
            for row in wish.released:
                self._rows.pop(row, None)
            self._put_back(grant.preempted[::-1])
        return self.roster.commit(choice, grant)

    def _check_offer(self, wish: ReserveBlocks) -> None:
        """Fails unless those are offered that stand first in the line, with all that is known of them."""
        line = [key for priority in sorted(self._line) for key in self._line[priority]]
        for key, admission in zip(line, wish.admissions, strict=False):
            known = [*self.courses[key].asked.tokens, *self.courses[key].tokens]
            assert admission.num_tokens == len(known)
            assert admission.tokens in (b"", pack_ints(known))
        assert len(wish.admissions) <= len(line)

    def _give_back(self) -> None:
        wish = self.roster.give_back()
        if wish is not None:
            self.roster.count(self.pool.reserve(wish))
            for row in wish.released:
                self._rows.pop(row, None)

    def _forget_prefixes(self) -> None:
        self.pool.forget_prefixes()
        self.roster.count(
            self.pool.reserve(self.roster.give_back() or ReserveBlocks([], [], [], [], [], [], 0))
        )

    def _enter(self, outcome: Outcome) -> None:
        for key, token in zip(outcome.requests, unpack_ints(outcome.tokens), strict=True):
            assert self.courses[key].ending is None
            self.courses[key].tokens.append(token)
        for ending in outcome.finished:
            course = self.courses[ending.request_id]
            assert course.ending is None
            course.ending = ending
            queue = self._line.get(course.asked.priority, [])
            if ending.request_id in queue:
                queue.remove(ending.request_id)

    def _check(self, plan: StepPlan) -> None:
        """Fails unless the plan keeps the budget, admits in order, and each row goes on where it was."""
        rows = [Row(row) for row in unpack_ints(plan.rows)]
        starts, lengths = unpack_ints(plan.starts), unpack_ints(plan.lengths)
        assert 0 < len(rows) == len(set(rows)) <= self.limits.max_requests
        assert min(lengths) > 0
        assert sum(lengths) <= self.limits.max_tokens
        self.num_computed += sum(lengths)
        for setup in plan.new_rows:
            self._admit(setup.row, RequestId(setup.sampling.seed))
            self._next_starts.pop(setup.row, None)
        for row, start, length in zip(rows, starts, lengths, strict=True):
            assert start == self._next_starts.get(row, start)
            assert row in self._next_starts or start % self.limits.block_size == 0
            self._next_starts[row] = start + length

    def _admit(self, row: Row, key: RequestId) -> None:
        """Fails when one is admitted that does not wait; counts whom it has passed."""
        course = self.courses[key]
        queue = self._line[course.asked.priority]
        for priority, others in self._line.items():
            if priority < course.asked.priority:
                self._pass(others)
        place = queue.index(key)
        self._pass(queue[:place])
        del queue[place]
        course.num_admissions += 1
        self._rows[row] = key

    def _pass(self, keys: list[RequestId]) -> None:
        for key in keys:
            self.courses[key].num_passes += 1

    def _put_back(self, rows: list[Row]) -> None:
        """Follows rows that yielded, in order of precedence."""
        for row in reversed(rows):
            key = self._rows.pop(row)
            if self.courses[key].ending is None:
                self._line[self.courses[key].asked.priority].insert(0, key)


def new_request(key: RequestId, asked: Asked) -> NewRequest:
    """Gives a request as the roster takes it; its seed tells whose a row is."""
    return NewRequest(
        request_id=key,
        prompt=pack_ints(asked.tokens),
        max_new_tokens=asked.num_new,
        stop_token_ids=(),
        sampling=Sampling(temperature=0.0, seed=key),
        text=TextSpec(key),
        priority=asked.priority,
        salt=asked.salt,
        shares_prefix=asked.is_fork,
        scores_prompt=asked.scores,
    )
