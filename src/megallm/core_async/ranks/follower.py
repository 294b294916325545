"""A rank that follows: it runs the leader's plans, and ends when the leader ends.

An `Engine` that has a worker and, in place of scheduler and pump, the socket to the leader. Calls of its own
program pair with those of the leader's.
"""

from collections import deque
from functools import partial
from typing import assert_never

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.kit.foreign import poster
from megallm.core_async.kit.outbox import Outboxes
from megallm.core_async.kit.reply import Reply
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import FollowStep, ReleaseCache, RestoreCache, TokenBatch
from megallm.core_async.plan.phases import Phase
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.blame import RankWorker
from megallm.core_async.ranks.led import Led
from megallm.core_async.ranks.watch import STEP_S, Watch
from megallm.core_async.transport.rank_frames import (
    FROM_LEADER,
    AskWhere,
    CacheChanged,
    CallEnded,
    ChangeCache,
    End,
    FromLeader,
    Gave,
    Go,
    Here,
    RunStep,
    Started,
)
from megallm.core_async.transport.ranks import RankStream


class _Job(Struct, eq=False):
    """What the worker does for the leader, and the frame that says so, if one does."""

    reply: Reply[None]
    answer: CacheChanged | None


class Follower(Led[FromLeader]):
    """One rank's part of an engine whose leader is another. `run` is its task."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        ranks: Ranks,
        *,
        step_s: float = STEP_S,
    ) -> None:
        """Nothing starts before `run`. `step_s`: that a step may take at most."""
        super().__init__(config, runner, tokenizer, ranks)
        self._step_s = step_s

    # ---- running -------------------------------------------------------------------------------

    def _build(self) -> None:
        self._post = poster()
        self._is_built = True
        self._outboxes = Outboxes[Parcel](lambda: None)
        self._stop_asked = anyio.Event()
        self._has_ended = anyio.Event()
        self._rank_worker = RankWorker(self._runner, self._own_name, self.report)
        self._jobs: deque[_Job] = deque()
        self._has_jobs = anyio.Event()
        self._num_done = 0

    async def _start(self, supervisor: Supervisor) -> None:
        leader = await self._meet(supervisor, FROM_LEADER)
        self._watch = Watch([leader], self._own_name, step_s=self._step_s)
        try:
            await supervisor.start("worker", self._rank_worker.run)
        except Exception as error:
            self._tell_of_start(error)
            raise
        leader.put(Started())
        await supervisor.start("from the leader", partial(self._read, leader))
        await supervisor.start("jobs", partial(self._do_jobs, leader))
        await self._wait_for_all(supervisor)

    # ---- the leader ----------------------------------------------------------------------------

    async def _read(self, leader: RankStream[FromLeader], *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        try:
            while not self._is_stopping:
                for frame in await leader.receive():
                    self._take(leader, frame)
        finally:
            self._rank_worker.is_explained.set()

    def _take(self, leader: RankStream[FromLeader], frame: FromLeader) -> None:
        match frame:
            case RunStep() | ChangeCache():
                self._order(frame)
            case Gave(batch):
                self._take_output(batch)
            case CallEnded():
                self._calls.end(frame)
            case AskWhere():
                leader.put(Here(self._num_done))
            case Here(num_steps):
                self._watch.answered(leader.name, num_steps)
                self._calls_watch.answered(leader.name, num_steps)
            case Go():
                self._has_gone_on.set()
            case End(fault):
                self._end(fault)
            case _:
                assert_never(frame)

    def _take_output(self, batch: TokenBatch) -> None:
        raise AssertionError(f"output of {len(batch.requests)} requests came to a rank that has made none")

    def _order(self, frame: RunStep | ChangeCache) -> None:
        """Hands the worker what it is to do."""
        worker = self._rank_worker.address
        match frame:
            case RunStep(plan):
                job = _Job(worker.send(FollowStep(plan)), None)
            case ChangeCache(is_release, kept):
                change = ReleaseCache(kept) if is_release else RestoreCache()
                job = _Job(worker.send(change), CacheChanged())
        self._jobs.append(job)
        self._has_jobs.set()

    async def _do_jobs(self, leader: RankStream[FromLeader], *, task_status: TaskStatus[None]) -> None:
        """Waits for what the worker does, in order; the leader is watched meanwhile."""
        task_status.started()
        while True:
            await self._has_jobs.wait()
            self._has_jobs = anyio.Event()
            while self._jobs:
                job = self._jobs[0]
                await self._watch.wait_for(job.reply.wait, self._num_done)
                self._jobs.popleft()
                if job.answer is None:
                    self._num_done += 1
                else:
                    leader.put(job.answer)

    @property
    def phase(self) -> Phase:
        """Where the engine is, as far as this rank knows: what the leader pauses, pauses here too."""
        if self._failure is not None:
            return Phase.FAILED
        if self._is_stopping:
            return Phase.STOPPED if self._has_ended.is_set() else Phase.STOPPING
        return Phase.RUNNING if self._is_started else Phase.STARTING
