"""What is common to the engines that another rank's starts, calls and ends.

Owns the socket to that rank, and pairs the calls of this rank's program with those of its. Knows neither
plans nor requests.
"""

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.actors.worker import Worker, WorkerActor
from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineStoppedError, RankLostError
from megallm.core_async.kit.foreign import on_own_thread
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import NewRequest
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.together import SHUTDOWN, MadeCalls
from megallm.core_async.ranks.watch import watch_of_calls
from megallm.core_async.transport.frames import Fault, error_of, fault_of
from megallm.core_async.transport.framing import Kinds
from megallm.core_async.transport.rank_frames import Failed
from megallm.core_async.transport.ranks import Meeting, RankStream, connect


class Led[F](Engine):
    """An engine whose first rank is another's; F are the frames that come from there."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        ranks: Ranks,
        *,
        make_worker: Callable[[Runner], WorkerActor] = Worker,
    ) -> None:
        """`ranks`: the one that leads first. Nothing starts before `run`."""
        super().__init__(config, runner, tokenizer, make_worker=make_worker)
        self._ranks = ranks
        self._own_name, self._leader_name = ranks.names[ranks.place], ranks.names[0]
        self._leader: RankStream[F] | None = None
        self._calls = MadeCalls(self._tell)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves the rank that leads until that stops, a failure, or a cancel; ready once every rank is.

        Raises: what the start of this rank raised; RankLostError when another's failed.
        """
        try:
            await super().run(task_status=task_status)
        finally:
            self._calls.fail(self.error)
            if self._leader is not None:
                self._leader.close()

    async def _meet(self, supervisor: Supervisor, kinds: Kinds[F]) -> RankStream[F]:
        """Connects to the rank that leads."""
        records = await on_own_thread(partial(self._ranks.exchange, b""))
        meeting = msgspec.msgpack.decode(records[0], type=Meeting)
        leader = self._leader = await connect(meeting, self._ranks.place, self._leader_name, kinds)
        self._calls_watch = watch_of_calls(leader, self._own_name)
        self._has_gone_on = anyio.Event()
        await supervisor.start("to the leader", leader.flush)
        return leader

    async def _wait_for_all(self, supervisor: Supervisor) -> None:
        """Waits until every rank has started."""
        await supervisor.start("calls", partial(self._calls.awaited.watch, self._calls_watch))
        await self._has_gone_on.wait()

    def report(self, failure: RankLostError) -> None:
        """Tells of a failure at once, from the worker's thread: the reply is what all ranks end with."""
        self.post(partial(self._tell, Failed(fault_of(failure))))

    def _tell_of_start(self, error: Exception) -> None:
        self._tell(Failed(fault_of(RankLostError(f"rank {self._own_name} did not start: {error}"))))

    def _tell(self, frame: Struct) -> None:
        if self._leader is not None:
            self._leader.put(frame)

    def _end(self, fault: Fault) -> None:
        """Ends as the rank that leads says. Raises: what that failed with."""
        error = error_of(fault)
        if not isinstance(error, EngineStoppedError) or not self._has_gone_on.is_set():
            raise error
        self._is_stopping = True
        self._stop_asked.set()

    # ---- calls ---------------------------------------------------------------------------------

    async def call_made(self, name: str) -> None:
        """Waits until the call of that name is over on every rank.

        Raises: what the leading rank's call raised; EngineStoppedError, EngineDeadError.
        """
        self.check_alive()
        await self._calls.made(name).wait()

    async def wait_for_leader(self) -> None:
        """Waits until the rank that leads has shut down, or anything else has ended the engine."""
        if self._is_started and not self._has_ended.is_set():
            self._calls.made(SHUTDOWN)
            await self._has_ended.wait()

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """Refuses: requests go to the rank that leads. Raises: RuntimeError."""
        del requests
        raise RuntimeError(
            f"rank {self._own_name} runs what rank {self._leader_name} sends it, which takes requests"
        )

    async def queue(self, requests: list[NewRequest]) -> None:
        """Refuses, as `submit`. Raises: RuntimeError."""
        await self.submit(requests)

    def go_on(self) -> None:
        """Does nothing: the rank that leads goes on, and this one with it."""
