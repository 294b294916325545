"""The leader of some ranks: to its engine a worker like any other, whose messages all ranks get.

Owns the sockets to the other ranks. A plan goes to each of them as one frame, encoded once; the leader's own
rank runs it at the same time, and only its result is looked at, since all ranks sample the same ids. Knows
messages and frames; knows no request.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.errors import ActorGone, EngineDeadError, EngineStoppedError, RankLostError
from megallm.core_async.kit.foreign import on_own_thread
from megallm.core_async.kit.reply import Reply, gone_error
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Ask,
    CollectStep,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    WorkerMessage,
)
from megallm.core_async.protocols import Runner
from megallm.core_async.ranks.blame import BLAME_S, TOLD_BLAME_S, RankWorker
from megallm.core_async.ranks.together import Gathering
from megallm.core_async.ranks.watch import STEP_S, Watch
from megallm.core_async.transport.frames import error_of, fault_of
from megallm.core_async.transport.rank_frames import (
    FROM_FOLLOWER,
    AskWhere,
    CacheChanged,
    CallMade,
    ChangeCache,
    End,
    Failed,
    FromFollower,
    Go,
    Here,
    Join,
    RunStep,
    Started,
)
from megallm.core_async.transport.ranks import MeetingPlace, RankStream, encoded

DRAIN_S: Final = 5.0
"""How long a stop waits for the steps in flight, and then for the other ranks to end."""

LOST_DRAIN_S: Final = 1.0
"""The same after a failure: one of them may hang."""


class _Job(Struct, eq=False):
    """What the engine waits for: its own rank's answer, and the other ranks' where they give one."""

    own: Reply[object]
    reply: Reply[object]
    is_step: bool


class Leader:
    """`WorkerActor` and its `Address`: the engine's loop calls it."""

    def __init__(
        self,
        runner: Runner,
        ranks: Ranks,
        why: Callable[[], Exception],
        *,
        host: str | None = None,
        port: int | None = None,
        step_s: float = STEP_S,
        blame_s: float = BLAME_S,
    ) -> None:
        """`why` gives what has ended the engine, where that was no rank; `host`, `port`: to listen on.

        `blame_s`: see RankWorker.
        """
        self._ranks = ranks
        self._why = why
        self._host, self._port = host, port
        self._step_s = step_s
        self._name = ranks.names[0]
        self._own = RankWorker(runner, self._name, lambda _: None, blame_s=blame_s)
        self._streams: list[RankStream[FromFollower]] = []
        self._failure: Exception | None = None
        self._has_gone = False
        self._is_blamed = anyio.Event()
        """Set once a rank is lost: what else fails is a consequence."""
        self._jobs: deque[_Job] = deque()
        self._has_jobs = anyio.Event()
        self._has_none = anyio.Event()
        self._num_launched = 0
        self._num_asked = 0
        self._num_done = 0
        self._num_starting = len(ranks.names) - 1
        self._all_started = anyio.Event()
        self._num_changing = 0
        self._all_changed = anyio.Event()
        self.calls = Gathering(ranks.names[1:])
        """Calls of the lifecycle that every rank's program makes."""

    @property
    def address(self) -> "Leader":
        """Where the ranks are reached."""
        return self

    @property
    def traffic(self) -> tuple[int, int]:
        """Frames and bytes written to other ranks so far."""
        return sum(each.num_frames for each in self._streams), sum(each.num_bytes for each in self._streams)

    # ---- the address ---------------------------------------------------------------------------

    def tell(self, message: WorkerMessage) -> None:
        """See Address. A plan is on its way to every rank when this returns."""
        self._check_here()
        assert isinstance(message, LaunchStep), f"a {type(message).__name__} is asked, not told"
        self._to_all(RunStep(message.plan))
        self._own.address.tell(message)
        self._num_launched += 1

    def send[R](self, message: Ask[R]) -> Reply[R]:
        """See Address."""
        self._check_here()
        is_step = isinstance(message, CollectStep)
        if is_step:
            self._num_asked += 1
        else:
            self._to_all(_change(message))
        reply: Reply[R] = Reply()
        own = self._own.address.send(message)
        self._add(_Job(own, reply, is_step))  # type: ignore[arg-type] - both of one R
        return reply

    async def ask[R](self, message: Ask[R]) -> R:
        """See Address."""
        return await self.send(message).wait()

    def to_all(self, frame: Struct) -> None:
        """Tells every other rank; does nothing once they have gone."""
        if not self._has_gone:
            self._to_all(frame)

    def _to_all(self, frame: Struct) -> None:
        chunk = encoded(frame)
        for stream in self._streams:
            stream.put_bytes(chunk)

    def _check_here(self) -> None:
        if self._has_gone:
            raise self._make_gone()

    def _make_gone(self) -> ActorGone:
        return gone_error("ranks", self._failure)

    # ---- running -------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Gathers the ranks, serves until cancelled, and ends them; ready once all have started.

        A cancel lets the steps in flight end on every rank. Raises: RankLostError naming the first rank
        that was lost; what the start of this one raised.
        """
        try:
            place = MeetingPlace(self._host, self._port)
            try:
                record = msgspec.msgpack.encode(place.meeting)
                await on_own_thread(partial(self._ranks.exchange, record))
                self._streams = await place.others(self._ranks.names, FROM_FOLLOWER)
            finally:
                place.close()
            async with Supervisor(self._fail) as supervisor:
                await self._start(supervisor)
                task_status.started()
                await self._serve_until_cancelled()
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._go()
            await self._end()

    async def _start(self, supervisor: Supervisor) -> None:
        self._watch = Watch(self._streams, self._name, step_s=self._step_s)
        for stream in self._streams:
            await supervisor.start(f"to rank {stream.name}", stream.flush)
            await supervisor.start(f"from rank {stream.name}", partial(self._read, stream))
        await supervisor.start("worker", self._own.run)
        await self._all_started.wait()
        self._to_all(Go())
        await supervisor.start("jobs", self._do_jobs)

    async def _serve_until_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if self._failure is None:  # steps that some rank has begun end on all, or their threads hang
                with anyio.move_on_after(DRAIN_S, shield=True):
                    while self._num_asked < self._num_launched:
                        self.send(CollectStep())
                    while self._jobs:
                        await self._has_none.wait()

    def _fail(self, failure: Exception) -> None:
        """Notes the first failure, and ends whoever waits."""
        if self._failure is None:
            self._failure = failure
            self._go()

    def _go(self) -> None:
        if self._has_gone:
            return
        self._has_gone = True
        self._own.is_explained.set()
        self._to_all(End(fault_of(self._ending())))
        while self._jobs:
            self._jobs.popleft().reply.fail(self._make_gone())
        self.calls.fail(self._make_gone)

    def _ending(self) -> RankLostError | EngineStoppedError:
        """Gives what the other ranks end with: that the engine was stopped, or which rank has failed."""
        error = self._failure or self._why()
        if isinstance(error, RankLostError | EngineStoppedError):
            return error
        first = error.__cause__ if isinstance(error, EngineDeadError) else error
        return RankLostError(f"rank {self._name} failed: {type(first).__name__}: {first}")

    async def _end(self) -> None:
        """Waits until the other ranks have ended too, which they say by closing."""
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for stream in self._streams:
                        tasks.start_soon(stream.drain, DRAIN_S if self._failure is None else LOST_DRAIN_S)
        finally:
            for stream in self._streams:
                stream.close()

    # ---- from the other ranks ------------------------------------------------------------------

    async def _read(
        self, stream: RankStream[FromFollower], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        task_status.started()
        try:
            while True:
                for frame in await stream.receive():
                    await self._take(stream, frame)
        except RankLostError:
            self._is_blamed.set()
            raise

    async def _take(self, stream: RankStream[FromFollower], frame: FromFollower) -> None:
        match frame:
            case Started():
                self._num_starting -= 1
                if not self._num_starting:
                    self._all_started.set()
            case CacheChanged():
                self._num_changing -= 1
                if not self._num_changing:
                    self._all_changed.set()
            case CallMade(number, name):
                self.calls.note(stream.name, number, name)
            case AskWhere():
                stream.put(Here(self._num_done))
            case Here(num_steps):
                self._watch.answered(stream.name, num_steps)
            case Failed(fault):
                with anyio.move_on_after(TOLD_BLAME_S):  # it may have failed because another rank has gone
                    await self._is_blamed.wait()
                raise error_of(fault)
            case Join():
                raise RankLostError(f"rank {stream.name} is lost: it joins twice")
            case _:
                assert_never(frame)

    # ---- what the engine waits for -------------------------------------------------------------

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._has_jobs.set()
        if not job.is_step:
            self._num_changing = len(self._streams)
            self._all_changed = anyio.Event()

    async def _do_jobs(self, *, task_status: TaskStatus[None]) -> None:
        """Passes answers on, in order; the other ranks are watched meanwhile."""
        task_status.started()
        while True:
            await self._has_jobs.wait()
            self._has_jobs = anyio.Event()
            while self._jobs:
                job = self._jobs[0]
                answer = await self._watch.wait_for(job.own.wait, self._num_done)
                if job.is_step:
                    self._num_done += 1
                else:
                    await self._watch.wait_for(self._all_changed.wait, self._num_done)
                self._jobs.popleft()
                job.reply.set(answer)
            self._has_none.set()
            self._has_none = anyio.Event()


def _change(message: object) -> ChangeCache:
    """Gives what the other ranks are told where the engine asks for a change of the cache."""
    match message:
        case ReleaseCache(kept):
            return ChangeCache(is_release=True, kept=kept)
        case RestoreCache():
            return ChangeCache(is_release=False)
        case _:
            raise AssertionError(f"{type(message).__name__} is nothing that ranks are asked")
