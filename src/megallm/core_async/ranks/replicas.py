"""The other replicas as the coordinator sees them: who is there, what they say, and how they end.

Owns the links. Knows frames; knows no router, no text and no model: those are the `Listener`'s.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus
from msgspec import Struct, structs

from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.errors import RankLostError
from megallm.core_async.kit.foreign import on_own_thread
from megallm.core_async.kit.reply import gone_error
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import EngineStats, NewRequest, PrefixReport, RequestId
from megallm.core_async.ranks.blame import TOLD_BLAME_S
from megallm.core_async.ranks.replica_link import ReplicaLink, loop_ahead_s
from megallm.core_async.ranks.together import Gathering
from megallm.core_async.transport.frames import error_of, fault_of
from megallm.core_async.transport.rank_frames import AskWhere, CallMade, End, Failed, Go, Here, Join
from megallm.core_async.transport.ranks import MeetingPlace
from megallm.core_async.transport.replica_frames import (
    FROM_REPLICA,
    Figures,
    FromReplica,
    OrderDone,
    OrderedCall,
    Output,
    ReplicaStarted,
    StepBegun,
)

log = logging.getLogger(__name__)

DRAIN_S: Final = 5.0
"""How long a stop waits for the other replicas to end."""
LOST_DRAIN_S: Final = 1.0
"""The same after a failure: one of them may hang."""


class Listener(Protocol):
    """Who hears what replicas say; called in the loop."""

    async def took_output(self, link: ReplicaLink, output: Output) -> None:
        """A step gave something."""
        ...

    def figures_changed(self, link: ReplicaLink, prefixes: PrefixReport | None) -> None:
        """A replica has come to rest, or has flushed its prefix cache."""
        ...

    def step_begun(self, number: int) -> None:
        """A replica has begun the step of that number."""
        ...

    async def losing(self, place: int) -> None:
        """A replica is gone; what is queued there from now on goes elsewhere."""
        ...

    async def lost(self, silent: list[NewRequest], failed: list[RequestId], why: RankLostError) -> None:
        """These were there: those that had produced nothing, and the others."""
        ...


class Replicas:
    """Every replica but the coordinator's own."""

    def __init__(
        self,
        ranks: Ranks,
        listener: Listener,
        *,
        stands_alone: bool,
        host: str | None = None,
        port: int | None = None,
    ) -> None:
        """`ranks`: that lead a replica each, the coordinator's first. `host`, `port`: to listen on.

        `stands_alone`: each can run without the others, whose loss ends nobody else then.
        """
        self._ranks = ranks
        self._own_name = ranks.names[0]
        self._listener = listener
        self._stands_alone = stands_alone
        self._host, self._port = host, port
        self.links: dict[int, ReplicaLink] = {}
        """Those that are there, by place."""
        self.calls = Gathering(ranks.names[1:])
        """Calls of the lifecycle that every replica's program makes."""
        self._has_gone_on = self._has_ended = False
        self._num_starting = len(ranks.names) - 1
        self._all_started = anyio.Event()
        self._is_blamed = anyio.Event()
        """Set once a replica is lost: what else fails may be a consequence."""
        self._reading: list[anyio.CancelScope] = []
        self._lost_stats: list[EngineStats] = []
        """What those that are gone had done, which counts on."""

    def to_all(self, frame: Struct) -> None:
        """Tells every one of them."""
        for link in self.links.values():
            link.tell(frame)

    def all_stats(self) -> list[EngineStats]:
        """Gives the figures of each, as they were told last; callable from any thread."""
        return [*(link.stats for link in list(self.links.values())), *self._lost_stats]

    def take_part(self, *, is_awaited: bool) -> None:
        """Notes whether a step that all take together is under way, in which each is watched."""
        for link in self.links.values():
            link.take_part(is_awaited=is_awaited)

    def order(self, call: OrderedCall, *, mode: str, epoch: int) -> list[Callable[[], Awaitable[None]]]:
        """Has every one make a call of the lifecycle; gives the waits for each."""
        return [link.order(call, mode=mode, epoch=epoch).wait for link in self.links.values()]

    def say_end(self, why: Exception) -> None:
        """Tells every one of them what it ends with, and whoever waits for their calls; the first holds."""
        if not self._has_ended:
            self._has_ended = True
            self.calls.fail(lambda: gone_error("replicas", why))
            self.to_all(End(fault_of(why)))

    # ---- running -------------------------------------------------------------------------------

    async def start(self, supervisor: Supervisor, why: Callable[[], Exception]) -> None:
        """Meets the others, and serves them as children of a supervisor, whose stop ends them.

        `why` gives what they end with then. Raises: RankLostError naming who did not come.
        """
        await supervisor.start("replicas", partial(self._keep, why))
        for link in self.links.values():
            await supervisor.start(f"replica of rank {link.name}", partial(self._serve, link))

    async def stop_reading(self, *, task_status: TaskStatus[None]) -> None:
        """A child to be started last, and so stopped first: what replicas say then is heard no more.

        Those that would hear it stop next, one after the other.
        """
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            for scope in self._reading:
                scope.cancel()

    async def all_started(self) -> None:
        """Waits until every replica has started, and lets them all go on."""
        if self._num_starting:
            await self._all_started.wait()
        self._has_gone_on = True
        self.to_all(Go())

    async def _keep(self, why: Callable[[], Exception], *, task_status: TaskStatus[None]) -> None:
        """Owns the sockets; a cancel ends the other replicas."""
        place = MeetingPlace(self._host, self._port)
        try:
            record = msgspec.msgpack.encode(place.meeting)
            await on_own_thread(partial(self._ranks.exchange, record))
            for number, stream in enumerate(await place.others(self._ranks.names, FROM_REPLICA), 1):
                self.links[number] = ReplicaLink(number, stream, self._own_name)
            task_status.started()
            await anyio.sleep_forever()
        finally:
            place.close()
            await self._end(why())

    async def _end(self, why: Exception) -> None:
        """Says that it is over, and waits until the others have ended too, which they say by closing."""
        self.say_end(why)
        streams = [link.stream for link in self.links.values()]
        self.links.clear()
        deadline_s = LOST_DRAIN_S if isinstance(why, RankLostError) else DRAIN_S
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for stream in streams:
                        tasks.start_soon(stream.drain, deadline_s)
        finally:
            for stream in streams:
                stream.close()

    async def _serve(self, link: ReplicaLink, *, task_status: TaskStatus[None]) -> None:
        """Reads what a replica says, until it is lost: then the others go on, where they can."""
        with anyio.CancelScope() as scope:
            self._reading.append(scope)
            task_status.started()
            try:
                async with Supervisor() as supervisor:
                    await supervisor.start("flush", link.stream.flush)
                    await supervisor.start("watch", partial(link.awaited.watch, link.watch))
                    await self._read(link)
            except RankLostError as lost:
                if not self._has_gone_on or not self._stands_alone:
                    raise
                await self._lose(link, lost)

    async def _read(self, link: ReplicaLink) -> None:
        while True:
            try:
                frames = await link.stream.receive()
            except RankLostError:
                self._is_blamed.set()
                raise
            for frame in frames:
                await self._take(link, frame)

    async def _lose(self, link: ReplicaLink, why: RankLostError) -> None:
        log.error("the replica of rank %d is gone, and the others go on: %s", link.name, why)
        await self._listener.losing(link.place)
        del self.links[link.place]
        link.stream.close()
        self.calls.lose(link.name)
        self._lost_stats.append(_counts_of(link.stats))
        await self._listener.lost(*link.lose(), why)

    async def _take(  # noqa: C901, PLR0912 - one case a frame
        self, link: ReplicaLink, frame: FromReplica
    ) -> None:
        match frame:
            case Output():
                await self._listener.took_output(link, frame)
            case Figures(stats, prefixes):
                link.stats = stats
                self._listener.figures_changed(link, prefixes)
            case OrderDone():
                link.done(frame)
            case CallMade(number, name):
                self.calls.note(link.name, number, name)
            case StepBegun(number):
                self._listener.step_begun(number)
                for other in self.links.values():
                    if other is not link:
                        other.tell(frame)
            case ReplicaStarted(now_s):
                link.ahead_s = loop_ahead_s(now_s)
                self._num_starting -= 1
                if not self._num_starting:
                    self._all_started.set()
            case AskWhere():
                link.tell(Here(0))  # which step is nobody's question here
            case Here(num_steps):
                link.watch.answered(link.name, num_steps)
            case Failed(fault):
                if not self._stands_alone:
                    with anyio.move_on_after(TOLD_BLAME_S):
                        await self._is_blamed.wait()
                raise error_of(fault)
            case Join():
                raise RankLostError(f"rank {link.name} is lost: it joins twice")
            case _:
                assert_never(frame)


def _counts_of(stats: EngineStats) -> EngineStats:
    """Gives what a replica that is gone has done, without what it was at."""
    return structs.replace(stats, running=0, waiting=0, used_blocks=0, cached_blocks=0, free_blocks=0)
