"""The engine of a replica that is not the coordinator's: requests come from there, and output goes there.

An `Engine` that has, in place of detokeniser and readers, the socket to the coordinator. Calls of its own
program pair with those of the coordinator's.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar, Final, assert_never

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.actors.detokenizer import OutputActor
from megallm.core_async.actors.worker import WorkerActor
from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.errors import MegaLLMError, RankLostError
from megallm.core_async.kit.actor import Actor
from megallm.core_async.kit.reply import Reply
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Pause,
    ReportPrefixes,
    Resume,
    SetEpoch,
    Submit,
    Suspend,
    TokenBatch,
    Unpause,
)
from megallm.core_async.plan.lockstep import Lockstep
from megallm.core_async.plan.prefix_changes import PrefixChanges
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.blame import RankWorker
from megallm.core_async.ranks.led import Led
from megallm.core_async.transport.frames import fault_of
from megallm.core_async.transport.rank_frames import AskWhere, CallEnded, End, Failed, Go, Here
from megallm.core_async.transport.ranks import RankStream
from megallm.core_async.transport.replica_frames import (
    FROM_COORDINATOR,
    Close,
    Figures,
    FromCoordinator,
    Order,
    OrderDone,
    Output,
    Queue,
    ReplicaStarted,
    StepBegun,
)

NO_LIMIT: Final = 1 << 62
"""Requests that may wait where somebody else has counted them."""


class Outlet(Actor[TokenBatch | OrderDone]):
    """Passes each step's output on, in the place of a detokeniser, and what was done after it in its turn."""

    name: ClassVar[str] = "outlet"
    capacity: ClassVar[int] = 64
    """One batch a step; it falls behind only while the loop itself does."""

    def __init__(self, pass_on: Callable[[TokenBatch | OrderDone], Awaitable[None]]) -> None:
        super().__init__()
        self._pass_on = pass_on

    async def handle(self, message: TokenBatch | OrderDone) -> None:
        """Passes it on."""
        await self._pass_on(message)


class Replica(Led[FromCoordinator]):
    """One replica's engine, whose requests another rank routes to it. `run` is its task."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        replicas: Ranks,
        *,
        make_worker: Callable[[Runner], WorkerActor],
        steps_together: bool = False,
    ) -> None:
        """`replicas`: the ranks that lead one each, the coordinator's first.

        `steps_together`: the replicas share experts; see plan/lockstep.py.
        """
        super().__init__(config, runner, tokenizer, replicas, make_worker=make_worker)
        self._max_waiting = NO_LIMIT  # the coordinator bounds what waits at all replicas together
        if config.routing_policy != "load_balanced":
            self._prefix_changes = PrefixChanges()
        if steps_together:
            self._lockstep = Lockstep(lambda number: self._tell(StepBegun(number)))

    # ---- running -------------------------------------------------------------------------------

    def _make_detokenizer(self) -> OutputActor:
        self._outlet = Outlet(self._pass_on)
        return self._outlet

    async def _start(self, supervisor: Supervisor) -> None:
        coordinator = await self._meet(supervisor, FROM_COORDINATOR)
        await supervisor.start("from the coordinator", partial(self._read, coordinator, supervisor))
        try:
            await super()._start(supervisor)
        except Exception as error:
            self._tell_of_start(error)
            raise
        self._tell(ReplicaStarted(anyio.current_time()))
        await self._wait_for_all(supervisor)

    def _fail(self, failure: Exception) -> None:
        super()._fail(failure)
        why = self._failure
        if not isinstance(why, RankLostError):
            why = RankLostError(f"rank {self._own_name} failed: {type(failure).__name__}: {failure}")
        self._tell(Failed(fault_of(why)))
        if isinstance(self._worker, RankWorker):
            self._worker.is_explained.set()

    async def _pass_on(self, message: TokenBatch | OrderDone) -> None:
        report = None
        if self._prefix_changes is not None and len(self._prefix_changes):
            report = await self._allocator.address.ask(ReportPrefixes())
        if isinstance(message, TokenBatch):
            self._tell(Output(message, self._stats, report))
            return
        if report is not None:
            self._tell(Figures(self._stats, report))
        self._tell(message)

    def _note_change(self) -> None:
        self._tell(Figures(self._stats))

    # ---- the coordinator -----------------------------------------------------------------------

    async def _read(
        self,
        coordinator: RankStream[FromCoordinator],
        supervisor: Supervisor,
        *,
        task_status: TaskStatus[None],
    ) -> None:
        task_status.started()
        while not self._is_stopping:
            for frame in await coordinator.receive():
                await self._take(frame, supervisor)

    async def _take(self, frame: FromCoordinator, supervisor: Supervisor) -> None:
        match frame:
            case Queue(requests):
                await self._scheduler.address.ask(Submit(requests))
            case Close(requests):
                self.close_requests(requests)
            case Order():
                await supervisor.start(frame.call, partial(self._carry_out, frame))
            case CallEnded():
                self._calls.end(frame)
            case StepBegun(number):
                assert self._lockstep is not None, "a step is begun together, and no experts are shared"
                self._lockstep.follow(number)
                self._gate.need()
            case AskWhere():
                self._tell(Here(0))  # which step is nobody's question here
            case Here():
                self._calls_watch.answered(self._leader_name, 0)
            case Go():
                self._has_gone_on.set()
            case End(fault):
                self._end(fault)
            case _:
                assert_never(frame)

    async def _carry_out(self, order: Order, *, task_status: TaskStatus[None]) -> None:
        reply = self._ordered(order)
        task_status.started()
        try:
            await reply.wait()
        except MegaLLMError as error:
            self._outlet.address.tell(OrderDone(order.number, fault_of(error)))
        else:
            self._outlet.address.tell(OrderDone(order.number))

    def _ordered(self, order: Order) -> Reply[None]:
        lifecycle = self._lifecycle.address
        match order.call:
            case "pause":
                return lifecycle.send(Pause(order.mode))
            case "unpause":
                return lifecycle.send(Unpause())
            case "suspend":
                return lifecycle.send(Suspend())
            case "resume":
                return lifecycle.send(Resume())
            case "set_generation_epoch":
                return self._scheduler.address.send(SetEpoch(order.epoch))
            case _:
                assert_never(order.call)

    # ---- calls ---------------------------------------------------------------------------------

    def call_failed(self, what: str) -> None:
        """Tells the coordinator of a call that this replica's own ranks have not made alike."""
        if self._is_started and not self._has_ended.is_set():
            self._calls.made(what)
