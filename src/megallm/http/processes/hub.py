"""One front end as the engine's loop sees it: its requests in, its part of every step out.

Knows frames and the engine; knows no HTTP, and no process.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, assert_never

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError, EngineStoppedError, MegaLLMError
from megallm.core_async.messages import NewRequest, RequestId, TokenBatch
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.frames import (
    AbortElsewhere,
    AbortHere,
    Answer,
    CallEngine,
    CloseRequests,
    Drain,
    EngineEnded,
    EngineState,
    FromFrontend,
    Ready,
    StepOutput,
    SubmitRequests,
    Welcome,
    fault_of,
)
from megallm.core_async.transport.framing import FrameError, FrameReader, FrameWriter
from megallm.core_async.transport.routes import owner_of, shifted

log = logging.getLogger(__name__)

MAX_BEHIND: Final = 64 * 2**20
"""Bytes that a front end may be behind, some millions of tokens: it does not read any more."""


class Peer:
    """Owns the engine's end of one front end's socket, and knows which requests are that front end's.

    A front end that goes, or falls too far behind, has its requests aborted. It never stalls a step:
    what it has not read waits here, and only here.
    """

    def __init__(
        self,
        engine: Engine,
        stream: ByteStream,
        setup: bytes,
        check_grammar: Callable[[str], None],
        *,
        max_behind: int = MAX_BEHIND,
    ) -> None:
        """`setup`: see Welcome. `check_grammar` compiles a grammar, on a thread, before a step needs it."""
        self.owner = engine.routes.new_owner()
        self.ready = anyio.Event()
        """Set once the front end answers its port."""
        self._engine = engine
        self._stream = stream
        self._check_grammar = check_grammar
        self._max_behind = max_behind
        self._live: set[RequestId] = set()
        self._compiling: set[RequestId] = set()
        """Requests not queued yet, since their grammar is being compiled."""
        self._out = FrameWriter()
        self._has_frames = anyio.Event()
        self._ahead_s = time.monotonic() - anyio.current_time()
        """How far `time.monotonic` is ahead of the loop's clock."""
        self._tasks: TaskGroup | None = None
        self._say(Welcome(self.owner, engine.config, engine.stats(), engine.phase, setup))

    async def run(self) -> None:
        """Serves the front end until it goes; its requests are aborted then, and the socket closed."""
        engine = self._engine
        engine.routes.attach(self.owner, self)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write_on)
                self._tasks.start_soon(self._tell_end)
                await self._read_on()
                self._tasks.cancel_scope.cancel()
        finally:
            engine.routes.detach(self.owner)
            engine.close_requests(list(self._live))
            self._stream.close()

    def drain(self, timeout_s: float) -> None:
        """Asks the front end to stop accepting, to finish what is under way, and to exit."""
        self._say(Drain(timeout_s))

    def drop(self) -> None:
        """Ends it at once: its socket closes, and its requests are aborted."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    # ---- out -----------------------------------------------------------------------------------

    def put(self, batch: TokenBatch) -> None:
        """See Route."""
        self._live.difference_update(finished.request_id for finished in batch.finished)
        self._say(StepOutput(shifted(batch, self._ahead_s), self._engine.stats()))

    def note(self) -> None:
        """See Route."""
        self._say(EngineState(self._engine.stats(), self._engine.phase))

    def abort(self, request_id: str | None) -> None:
        """See Route."""
        self._say(AbortHere(request_id))

    def _say(self, frame: Struct) -> None:
        self._out.add(frame)
        if len(self._out) > self._max_behind:
            log.error(
                "front end %d is %d bytes behind, the limit is %d; dropping it",
                self.owner,
                len(self._out),
                self._max_behind,
            )
            self.drop()
        self._has_frames.set()

    async def _write_on(self) -> None:
        try:
            while True:
                await self._has_frames.wait()
                self._has_frames = anyio.Event()
                await self._stream.send(self._out.take())
        except OSError:
            return  # the reader sees the end as well

    async def _tell_end(self) -> None:
        """Waits for the engine's end and tells it."""
        try:
            await self._engine.wait_for_shutdown()
        except (EngineDeadError, EngineStoppedError) as error:
            fault = fault_of(error)
        else:
            fault = fault_of(self._engine.error())
        self._say(EngineEnded(fault, self._engine.phase))

    # ---- in ------------------------------------------------------------------------------------

    async def _read_on(self) -> None:
        frames = FrameReader[FromFrontend](FromFrontend.__value__)
        try:
            while chunk := await self._stream.receive():
                for frame in frames.feed(chunk):
                    await self._take(frame)
        except OSError as error:
            log.debug("front end %d: %s", self.owner, error)
        except FrameError:
            log.exception("front end %d sent what makes no sense; dropping it", self.owner)

    async def _take(self, frame: FromFrontend) -> None:
        assert self._tasks is not None
        match frame:
            case SubmitRequests(call, requests):
                if any(owner_of(request.request_id) != self.owner for request in requests):
                    raise FrameError(f"front end {self.owner} submits requests of another")
                if any(request.sampling.grammar for request in requests):
                    self._compiling.update(request.request_id for request in requests)
                    self._tasks.start_soon(self._compile, call, requests)
                else:
                    await self._queue(call, requests)
            case CloseRequests(requests):
                self._compiling.difference_update(requests)
                closed = self._live.intersection(requests)
                if closed:
                    self._live -= closed
                    self._engine.close_requests(list(closed))
            case CallEngine():
                self._tasks.start_soon(self._call, frame)
            case AbortElsewhere(request_id):
                self._engine.routes.abort_elsewhere(request_id, self.owner)
            case Ready():
                self.ready.set()
            case _:
                assert_never(frame)

    async def _compile(self, call: int, requests: list[NewRequest]) -> None:
        """Compiles the grammars of a submission off the loop, and queues it unless it was closed meanwhile.

        A grammar that can't be compiled was refused by the front end; the step says so once more.
        """
        try:
            for grammar in {request.sampling.grammar for request in requests} - {""}:
                await to_thread.run_sync(self._check_grammar, grammar)
        except ValueError as error:
            self._compiling.difference_update(request.request_id for request in requests)
            self._say(Answer(call, self._engine.phase, fault_of(error)))
            return
        wanted = [request for request in requests if request.request_id in self._compiling]
        self._compiling.difference_update(request.request_id for request in wanted)
        if len(wanted) == len(requests):
            await self._queue(call, requests)

    async def _queue(self, call: int, requests: list[NewRequest]) -> None:
        request_ids = [request.request_id for request in requests]
        self._live.update(request_ids)
        try:
            await self._engine.queue(requests)
        except MegaLLMError as error:
            self._live.difference_update(request_ids)
            self._say(Answer(call, self._engine.phase, fault_of(error)))
        else:
            self._say(Answer(call, self._engine.phase))

    async def _call(self, frame: CallEngine) -> None:
        try:
            match frame.method:
                case "pause":
                    await self._engine.pause(frame.argument)
                case "unpause":
                    await self._engine.unpause()
                case "suspend":
                    await self._engine.suspend()
                case "resume":
                    await self._engine.resume()
                case "profile":
                    await self._engine.profile(frame.argument)
        except (MegaLLMError, ValueError) as error:
            self._say(Answer(frame.call, self._engine.phase, fault_of(error)))
        else:
            self._say(Answer(frame.call, self._engine.phase))
