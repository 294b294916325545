"""READ FIRST: the engine builds its actors, runs the pump, and stops them.

A request's way: `submit` asks the scheduler; the pump asks the scheduler for a plan, launches it on
the ranks, collects the result of the plan before it, and passes the tokens to the detokeniser,
which fills the readers' outboxes. Two plans are in flight, so that planning and text hide behind
the forward pass.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.actors.allocator import Allocator
from megallm.core_async.actors.detokenizer import Detokenizer, OutputActor, Parcel
from megallm.core_async.actors.lifecycle import LifecycleActor
from megallm.core_async.actors.scheduler import Scheduler
from megallm.core_async.actors.worker import Worker, WorkerActor
from megallm.core_async.config import EngineConfig, check_epoch
from megallm.core_async.device.cuda_profiler import profile_cuda
from megallm.core_async.errors import ActorGone, EngineBusy, EngineDeadError, EngineStoppedError
from megallm.core_async.kit.actor import MailboxAddress
from megallm.core_async.kit.foreign import poster
from megallm.core_async.kit.gate import Gate
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Ask,
    EngineStats,
    NewRequest,
    NextStep,
    Pause,
    PumpRested,
    RequestId,
    Resume,
    SetEpoch,
    StepResult,
    Submit,
    Suspend,
    Unpause,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.lockstep import Lockstep, is_empty
from megallm.core_async.plan.phases import Phase, check_pause_mode
from megallm.core_async.plan.policy import Limits
from megallm.core_async.plan.prefix_changes import PrefixChanges
from megallm.core_async.plan.roster import Roster
from megallm.core_async.protocols import Link, Runner, Tokenizer
from megallm.core_async.step_times import StepTimes
from megallm.core_async.transport.link import LocalLink
from megallm.core_async.transport.routes import OWN, Routes, request_ids

DEPTH = 2
"""Plans in flight: one runs while the next is planned and the last one's text is made."""
HEADROOM = 8
"""Places of a mailbox that callers leave to the pump and the lifecycle."""


class Engine:
    """One model's engine. `run` is its task; every other method is called in the same loop.

    After a failure or a stop every call raises `EngineDeadError` or `EngineStoppedError`, and every
    open outbox ends with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        make_worker: Callable[[Runner], WorkerActor] = Worker,
    ) -> None:
        """Nothing starts before `run`. `make_worker`: tests on virtual time put one without a thread."""
        self.config, self._max_waiting = config, config.max_waiting
        self._make_worker = make_worker
        self.times = StepTimes()
        self._runner = runner
        self._tokenizer = tokenizer
        self.routes = Routes()
        """Where the output of other processes' requests goes."""
        self.abort_elsewhere = partial(self.routes.abort_elsewhere, owner=OWN)
        """Has front ends in other processes end the HTTP requests of an X-Request-Id, or of None all."""
        self.next_request_id = request_ids(OWN)
        """Gives an id no other request of this engine has; callable from any thread."""
        self._stats = EngineStats(free_blocks=config.num_blocks)
        self._failure: Exception | None = None
        self._is_built = self._is_started = self._is_stopping = False
        self._post: Callable[[Callable[[], object]], None] | None = None
        self._prefix_changes: PrefixChanges | None = None  # noted for who routes requests by prefixes
        self._lockstep: Lockstep | None = None  # with engines whose steps are this one's too

    def stats(self) -> EngineStats:
        """Gives the engine's figures after its last step; callable from any thread."""
        return self._stats

    # ---- running -------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs the engine until `shutdown`, a failure, or a cancel; ready once every actor is.

        A failure after the start does not raise here: every call of the engine does.
        Raises: what the start of an actor raised, the runner's among them.
        """
        self._build()
        try:
            async with Supervisor(self._fail) as supervisor:
                await self._start(supervisor)
                self._is_started = True
                task_status.started()
                await self._stop_asked.wait()
                await supervisor.stop()
        except Exception as error:
            if not self._is_started:
                raise
            assert self._failure in (error, error.__cause__), f"{error!r}: the failure is {self._failure!r}"
        finally:
            self._is_stopping = True
            self._outboxes.fail_all(self.error)
            self._has_ended.set()

    def _build(self) -> None:
        config = self.config
        self._post = poster()
        self._is_built = True
        self._gate = Gate()
        self._outboxes = Outboxes[Parcel](self._gate.need)
        self._stop_asked, self._has_ended = anyio.Event(), anyio.Event()
        self._worker = self._make_worker(self._runner)
        self._link: Link = LocalLink(self._worker.address, collects_at_once=self._runner.runs_at_launch)
        self._allocator = Allocator(BlockPool.of(config, self._prefix_changes), self._prefix_changes)
        roster = Roster(Limits.of(config), num_blocks=config.num_blocks, max_waiting=self._max_waiting)
        self._scheduler = Scheduler(roster, self._allocator.address, self._gate)
        self._detokenizer = self._make_detokenizer()
        addresses = self._scheduler.address, self._detokenizer.address
        self._lifecycle = LifecycleActor(
            self._gate, *addresses, self._link, config.kv_mode, on_phase=self._note_change
        )

    def _make_detokenizer(self) -> OutputActor:
        return Detokenizer(self._tokenizer.detokenize, self._outboxes, self.times, self.routes)

    async def _start(self, supervisor: Supervisor) -> None:
        """Starts whoever is asked before whoever asks; they stop in the opposite order."""
        await supervisor.start("worker", self._worker.run)
        await supervisor.start("allocator", self._allocator.run)
        await supervisor.start("detokenizer", self._detokenizer.run)
        await supervisor.start("scheduler", self._scheduler.run)
        await supervisor.start("lifecycle", self._lifecycle.run)
        await supervisor.start("pump", self._pump)
        await self._lifecycle.begin()

    async def _pump(self, *, task_status: TaskStatus[None]) -> None:
        """Goes by when it is needed; says so once for each order, however many requests come meanwhile."""
        task_status.started()
        reported = 0
        while True:
            await self._gate.wait()
            order = await self._run_steps()
            self._note_change()
            if order != reported:
                self._lifecycle.address.tell(PumpRested(order))
                reported = order

    async def _run_steps(self) -> int:
        """Runs steps until there is nothing to plan; leaves none in flight. Gives the order it went by."""
        result: StepResult | None = None
        while True:
            order = self._gate.order
            self._gate.rest()
            began = time.perf_counter()
            closed = self._take_closed()
            planned = await self._scheduler.address.ask(NextStep(result, closed, self._gate.is_allowed))
            self.times.add_plan(time.perf_counter() - began)
            self._stats = self.times.stamped(planned.stats)
            plan = planned.plan if self._lockstep is None else self._lockstep.taken(planned.plan)
            if plan is not None:
                await self._link.launch(plan)
            if planned.batch is not None:
                self._detokenizer.address.tell(planned.batch)
            if plan is None and not self._link.in_flight:
                return order
            is_full = plan is None or self._link.in_flight == DEPTH
            result = await self._link.collect() if is_full else None
            if result is not None:
                self.times.add_result(result)
                result = None if is_empty(result) else result

    def _take_closed(self) -> list[RequestId]:
        """Gives the requests that nobody reads any more."""
        return [RequestId(key) for key in self._outboxes.take_closed()]

    def _note_change(self) -> None:
        """Tells who looks on from elsewhere that the figures or the phase have changed."""
        self.routes.note()

    # ---- requests ------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """Queues requests, all of them or none, and gives the outbox that their output comes to.

        Whoever takes the outbox closes it; closing it early aborts what has not ended. A cancel
        leaves nothing queued.
        Raises: EngineBusy, EngineStoppedError, EngineDeadError.
        """
        self.check_alive()
        outbox = self._outboxes.open([request.request_id for request in requests])
        try:
            await self.queue(list(requests))
        except BaseException:
            outbox.close()
            raise
        return outbox

    async def queue(self, requests: list[NewRequest]) -> None:
        """Queues requests, all of them or none, whose output goes the route of their owner.

        Raises: as `submit`. A cancel leaves them queued; `close_requests` takes them out.
        """
        await self._alive(self._scheduler.address, Submit(requests))

    def close_requests(self, requests: Sequence[RequestId]) -> None:
        """Aborts those of the requests that have not ended."""
        self._outboxes.report_closed(requests)

    def post(self, callback: Callable[[], object]) -> None:
        """Runs a callback in the engine's loop soon, from any thread; does nothing once the loop is gone."""
        if self._post is not None:
            self._post(callback)

    # ---- lifecycle -----------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the engine is; see plan/phases.py."""
        if self._failure is not None:
            return Phase.FAILED
        if not self._is_started:
            return Phase.STARTING
        if self._is_stopping:
            return Phase.STOPPED if self._has_ended.is_set() else Phase.STOPPING
        return self._lifecycle.phase

    async def pause(self, mode: str = "keep") -> None:
        """Comes to rest after the step in flight; new requests queue.

        `mode`: "keep" freezes the requests, "wait" lets those in flight finish first, "abort" ends
        them with what they have.
        Raises: ValueError for another mode; EngineStoppedError, EngineDeadError.
        """
        await self._alive(self._lifecycle.address, Pause(check_pause_mode(mode)))

    async def unpause(self) -> None:
        """Goes on. Raises: LifecycleError when suspended; EngineStoppedError, EngineDeadError."""
        await self._alive(self._lifecycle.address, Unpause())

    async def suspend(self) -> None:
        """Pauses, and gives the cache's memory back as the KV mode says.

        Raises: EngineStoppedError, EngineDeadError.
        """
        await self._alive(self._lifecycle.address, Suspend())

    async def resume(self) -> None:
        """Takes the cache's memory again; the engine is paused then.

        Raises: EngineStoppedError, EngineDeadError.
        """
        await self._alive(self._lifecycle.address, Resume())

    def go_on(self) -> None:
        """Asks for what makes the engine run, from whatever phase, and waits for nothing."""
        try:
            self._lifecycle.address.send(Resume())
            self._lifecycle.address.send(Unpause())
        except ActorGone:
            return  # it has ended, which every call says

    async def set_generation_epoch(self, epoch: object) -> None:
        """Stamps results with the number of the weights from now on.

        Raises: ValueError for a negative number; EngineStoppedError, EngineDeadError.
        """
        await self._alive(self._scheduler.address, SetEpoch(check_epoch(epoch)))

    async def profile(self, action: str) -> None:
        """Starts or stops the CUDA profiler of this process, as `action` is "start" or "stop".

        Raises: ValueError for another one; NoProfilerError; EngineStoppedError, EngineDeadError.
        """
        self.check_alive()
        profile_cuda(action)

    async def _alive[M, R](self, address: MailboxAddress[M], message: Ask[R]) -> R:
        """Asks an actor for the user; that it has gone is the engine's end."""
        self.check_alive()
        if address.room <= HEADROOM:
            raise EngineBusy("too many calls at once; try again later")
        try:
            return await address.ask(message)
        except ActorGone as gone:
            error = self.error()
            raise error from error.__cause__ or gone

    # ---- the end -------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Stops the engine and waits until it has stopped; pending calls end with EngineStoppedError.

        Idempotent; a failed engine has stopped.
        """
        if self._is_built:
            self._is_stopping = True
            self._outboxes.fail_all(self.error)
            self._stop_asked.set()
            await self._has_ended.wait()

    async def wait_for_shutdown(self) -> None:
        """Waits until the engine has stopped.

        Raises: EngineDeadError when it failed, EngineStoppedError when it was never started.
        """
        if self._is_built:
            await self._has_ended.wait()
        if self._failure is not None or not self._is_built:
            raise self.error()

    def check_alive(self) -> None:
        """Raises: EngineStoppedError or EngineDeadError unless the engine runs."""
        if self._failure is not None or self._is_stopping or not self._is_started:
            raise self.error()

    def error(self) -> EngineDeadError | EngineStoppedError:
        """Gives a new error that says why the engine does not run."""
        if self._failure is not None:
            dead = EngineDeadError(f"the engine failed: {type(self._failure).__name__}: {self._failure}")
            dead.__cause__ = self._failure
            return dead
        return EngineStoppedError(
            "the engine was shut down" if self._is_stopping else "the engine is not running"
        )

    def _fail(self, failure: Exception) -> None:
        """Notes the first failure: of an actor that fails because another one has, that one's."""
        cause = failure.__cause__ if isinstance(failure, ActorGone) else None
        self._failure = cause if isinstance(cause, Exception) else failure
        self._outboxes.fail_all(self.error)
