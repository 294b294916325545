"""The engine as a front end's process sees it: the engine's own interface, over a socket.

It runs the engine's detokeniser over the front end's rows of every step, so the text is made here,
and what a reader gets is what it would get in the engine's process.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import assert_never

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.actors.detokenizer import Detokenizer, Parcel
from megallm.core_async.errors import EngineDeadError, EngineStoppedError, InvalidRequestError
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.kit.reply import Reply
from megallm.core_async.messages import EngineStats, NewRequest, RequestId
from megallm.core_async.plan.pace import Pace
from megallm.core_async.plan.phases import Phase
from megallm.core_async.step_times import StepTimes
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.frames import (
    AbortElsewhere,
    AbortHere,
    Answer,
    CallEngine,
    CloseRequests,
    Drain,
    EngineCall,
    EngineEnded,
    EngineState,
    Fault,
    Ready,
    StepOutput,
    SubmitRequests,
    ToFrontend,
    Welcome,
    error_of,
)
from megallm.core_async.transport.framing import MAX_FRAME_BYTES, FrameError, FrameReader, FrameWriter
from megallm.core_async.transport.routes import request_ids, shifted

log = logging.getLogger(__name__)

GONE = Fault(EngineDeadError.__name__, "the engine's process has gone")


class Wire:
    """A front end's socket to the engine, and the frames that have come."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._reader = FrameReader[ToFrontend](ToFrontend.__value__)

    async def receive(self) -> list[ToFrontend]:
        """Waits for frames; none at the end of the stream.

        Raises: OSError, FrameError.
        """
        while chunk := await self.stream.receive():
            if frames := self._reader.feed(chunk):
                return frames
        return []

    async def welcome(self) -> tuple[Welcome, list[ToFrontend]]:
        """Waits for the engine's first word; gives also what came with it.

        Raises: EngineDeadError when the engine's process has gone; FrameError.
        """
        try:
            frames = await self.receive()
        except OSError:
            frames = []
        if not frames:
            raise error_of(GONE)
        first = frames[0]
        if not isinstance(first, Welcome):
            raise FrameError(f"the engine's first frame is a {type(first).__name__}, no Welcome")
        return first, frames[1:]


class RemoteEngine:
    """One front end's engine; `run` is its task, every other method is called in the same loop.

    Satisfies `service.EnginePort`. After the engine's end every call raises what the engine's own
    would, and every open outbox ends with it.
    """

    def __init__(
        self,
        wire: Wire,
        welcome: Welcome,
        detokenize: Callable[[Sequence[int]], str],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.on_drain: Callable[[float], None] = lambda _: None
        """Called with the seconds there are, once the engine's process says that this one is to end."""
        self.on_abort: Callable[[str | None], object] = lambda _: None
        """Called with an X-Request-Id, or None for all, once another front end was asked to abort."""
        self.config = welcome.config
        self.next_request_id = request_ids(welcome.owner)
        self.has_ended = anyio.Event()
        """Set once the engine has failed or stopped, or its process has gone."""
        self._wire = wire
        self._stats = welcome.stats
        self._phase = Phase(welcome.phase)
        self._fault: Fault | None = None
        self._ahead_s = 0.0
        """How far the loop's clock is ahead of `time.monotonic`."""
        self._out = FrameWriter(max_frame_bytes)
        self._has_news = anyio.Event()
        self._outboxes = Outboxes[Parcel](self._wake)
        self._pace = Pace()
        self._late_s = inf
        """When what waits for another step's tokens is given without; in the loop's time."""
        self._detokenizer = Detokenizer(detokenize, self._outboxes, StepTimes(), pace=self._pace)
        self._calls = count()
        self._replies: dict[int, Reply[None]] = {}

    def stats(self) -> EngineStats:
        """Gives the engine's figures as they were told last."""
        return self._stats

    @property
    def phase(self) -> Phase:
        """Where the engine is, as it was told last."""
        return self._phase

    # ---- running -------------------------------------------------------------------------------

    async def run(
        self, early: Sequence[ToFrontend], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Talks to the engine's process until that goes, or a cancel. `early`: frames that have come."""
        self._ahead_s = anyio.current_time() - time.monotonic()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_on)
                task_status.started()
                await self._read_on(early)
                log.error(GONE.message)
                tasks.cancel_scope.cancel()
        finally:
            self._end(GONE)
            self._wire.stream.close()

    def say_ready(self) -> None:
        """Tells the engine's process that the port answers."""
        self._say(Ready())

    async def _read_on(self, early: Sequence[ToFrontend]) -> None:
        frames = early
        try:
            while True:
                self._tell_time(frames)
                for frame in frames:
                    await self._take(frame)
                frames = await self._receive()
                if not frames:
                    return
        except OSError as error:
            log.debug("the engine's process: %s", error)
        except FrameError:
            log.exception("the engine's process sent what makes no sense")

    def _tell_time(self, frames: Sequence[ToFrontend]) -> None:
        """Tells the pace the time of the last step: those that came together count as one."""
        times = [frame.batch.time_s for frame in frames if isinstance(frame, StepOutput)]
        if times:
            self._pace.time_s = times[-1]

    async def _receive(self) -> list[ToFrontend]:
        """Waits for frames; meanwhile the streams' readers get what has waited for another step too long."""
        while True:
            with anyio.CancelScope(deadline=self._late_s):
                return await self._wire.receive()
            self._detokenizer.give_waiting()
            self._late_s = inf

    async def _take(self, frame: ToFrontend) -> None:
        match frame:
            case StepOutput(batch, stats):
                self._stats = stats
                await self._detokenizer.handle(shifted(batch, self._ahead_s))
                wait_s = self._pace.interval_s if self._pace.has_waiting else inf
                self._late_s = anyio.current_time() + wait_s
            case EngineState(stats, phase):
                self._stats, self._phase = stats, Phase(phase)
            case Answer(call, phase, fault):
                self._phase = Phase(phase)
                reply = self._replies.pop(call, None)
                if reply is not None and fault is not None:
                    reply.fail(error_of(fault))
                elif reply is not None:
                    reply.set(None)
            case EngineEnded(fault, phase):
                self._end(fault, Phase(phase))
            case Drain(timeout_s):
                self.on_drain(timeout_s)
            case AbortHere(request_id):
                self.on_abort(request_id)
            case Welcome():
                raise FrameError("the engine's process says Welcome twice")
            case _:
                assert_never(frame)

    async def _write_on(self) -> None:
        try:
            while True:
                await self._has_news.wait()
                self._has_news = anyio.Event()
                if closed := self._outboxes.take_closed():
                    self._out.add(CloseRequests([RequestId(key) for key in closed]))
                await self._wire.stream.send(self._out.take())
        except OSError:
            return  # the reader sees the end as well

    # ---- calls ---------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """Queues requests, all of them or none, and gives the outbox that their output comes to.

        Whoever takes the outbox closes it; closing it early aborts what has not ended. A cancel
        leaves nothing queued.
        Raises: EngineBusy, EngineStoppedError, EngineDeadError; InvalidRequestError when they are
        more than one frame holds.
        """
        self.check_alive()
        outbox = self._outboxes.open([request.request_id for request in requests])
        try:
            await self._call(SubmitRequests(next(self._calls), list(requests)))
        except FrameError as error:
            outbox.close()
            raise InvalidRequestError(f"the request is too large: {error}; send less at once") from error
        except BaseException:
            outbox.close()
            raise
        return outbox

    async def pause(self, mode: str = "keep") -> None:
        """See Engine. Raises: ValueError, EngineStoppedError, EngineDeadError."""
        await self._call_engine("pause", mode)

    async def unpause(self) -> None:
        """See Engine. Raises: LifecycleError, EngineStoppedError, EngineDeadError."""
        await self._call_engine("unpause")

    async def suspend(self) -> None:
        """See Engine. Raises: EngineStoppedError, EngineDeadError."""
        await self._call_engine("suspend")

    async def resume(self) -> None:
        """See Engine. Raises: EngineStoppedError, EngineDeadError."""
        await self._call_engine("resume")

    async def profile(self, action: str) -> None:
        """See Engine. Raises: ValueError, NoProfilerError, EngineStoppedError, EngineDeadError."""
        await self._call_engine("profile", action)

    def abort_elsewhere(self, request_id: str | None) -> None:
        """See Engine."""
        self._say(AbortElsewhere(request_id))

    async def _call_engine(self, method: EngineCall, argument: str = "") -> None:
        self.check_alive()
        await self._call(CallEngine(next(self._calls), method, argument))

    async def _call(self, frame: SubmitRequests | CallEngine) -> None:
        """Asks, and waits for the answer. A cancel abandons the answer."""
        reply = self._replies[frame.call] = Reply[None]()
        try:
            self._say(frame)
            await reply.wait()
        finally:
            self._replies.pop(frame.call, None)

    def _say(self, frame: Struct) -> None:
        self._out.add(frame)
        self._wake()

    def _wake(self) -> None:
        self._has_news.set()

    # ---- the end -------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises: EngineStoppedError or EngineDeadError once the engine has ended."""
        if self._fault is not None:
            raise self.error()

    def error(self) -> EngineDeadError | EngineStoppedError:
        """Gives a new error that says why the engine does not run."""
        error = EngineStoppedError("the engine runs") if self._fault is None else error_of(self._fault)
        assert isinstance(error, EngineDeadError | EngineStoppedError), f"the engine ended with {error!r}"
        return error

    def _end(self, fault: Fault, phase: Phase = Phase.FAILED) -> None:
        if self._fault is not None:
            return
        self._fault, self._phase = fault, phase
        self._detokenizer.give_waiting()
        self._outboxes.fail_all(self.error)
        for reply in self._replies.values():
            reply.fail(self.error())
        self.has_ended.set()
