"""The coordinator: the engine of the first replica, and the router of requests to all of them.

An `Engine` whose requests may run elsewhere. What other replicas give goes through its own detokeniser to
its own readers, as if it had run here.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
from anyio import lowlevel
from msgspec import structs

from megallm.core_async.actors.detokenizer import OutputActor
from megallm.core_async.actors.router import Router
from megallm.core_async.actors.worker import WorkerActor
from megallm.core_async.config import EngineConfig, check_epoch
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.engine import Engine
from megallm.core_async.errors import (
    EngineBusy,
    EngineDeadError,
    EngineStoppedError,
    LifecycleError,
    RankLostError,
)
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    DropRank,
    EngineStats,
    Finished,
    NewRequest,
    PrefixesChanged,
    PrefixReport,
    ReportPrefixes,
    RequestId,
    RequestsEnded,
    RouteRequests,
    TextSpec,
    TokenBatch,
    pack_floats,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.plan.lockstep import Lockstep
from megallm.core_async.plan.phases import check_pause_mode
from megallm.core_async.plan.prefix import extend_keys, root_of
from megallm.core_async.plan.prefix_changes import PrefixChanges
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.blame import RankWorker
from megallm.core_async.ranks.replica import NO_LIMIT
from megallm.core_async.ranks.replica_link import ReplicaLink
from megallm.core_async.ranks.replicas import DRAIN_S, Replicas
from megallm.core_async.ranks.shared_detokenizer import SharedDetokenizer
from megallm.core_async.transport.replica_frames import OrderedCall, Output, StepBegun

OWN_PLACE: Final = 0
HEADROOM: Final = 8
"""Places of the detokeniser's mailbox below which the replicas' output waits a turn of the loop."""


class Coordinator(Engine):
    """The engine of global rank 0 where the model has replicas. `run` is its task."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        ranks: Ranks,
        *,
        make_worker: Callable[[Runner], WorkerActor],
        steps_together: bool = False,
        host: str | None = None,
        port: int | None = None,
    ) -> None:
        """`ranks`: that lead a replica each, this one first. `host`, `port`: to listen on.

        `steps_together`: the replicas share experts; see plan/lockstep.py.
        """
        super().__init__(config, runner, tokenizer, make_worker=make_worker)
        self._max_waiting = NO_LIMIT  # the router bounds what waits at all replicas together
        self._num_replicas = len(ranks.names)
        self._own_name = ranks.names[0]
        self.replicas = Replicas(ranks, self, stands_alone=not steps_together, host=host, port=port)
        """The others."""
        if config.routing_policy != "load_balanced":
            self._prefix_changes = PrefixChanges()
        if steps_together:
            self._lockstep = Lockstep(self._announce)

    def stats(self) -> EngineStats:
        """Gives the figures of all replicas together; callable from any thread."""
        return _sum_of([self._stats, *self.replicas.all_stats()])

    # ---- running -------------------------------------------------------------------------------

    def _build(self) -> None:
        limits = self.config
        table = RoutingTable(
            self._num_replicas,
            policy=RoutingPolicy(limits.routing_policy),
            alpha=limits.routing_alpha,
            max_requests=limits.max_requests,
            max_keys=self._num_replicas * limits.num_blocks,
        )
        self._router = Router(table, max_pending=limits.max_waiting + limits.max_requests)
        super()._build()

    def _make_detokenizer(self) -> OutputActor:
        self._text = SharedDetokenizer(
            self._tokenizer.detokenize, self._outboxes, self.times, self.routes, on_batch=self._note_batch
        )
        return self._text

    async def _start(self, supervisor: Supervisor) -> None:
        await supervisor.start("router", self._router.run)
        await self.replicas.start(supervisor, self._ending)
        await super()._start(supervisor)
        await supervisor.start("replicas' readers", self.replicas.stop_reading)
        await self.replicas.all_started()

    def _fail(self, failure: Exception) -> None:
        super()._fail(failure)
        self.replicas.say_end(self._ending())
        if isinstance(self._worker, RankWorker):
            self._worker.is_explained.set()

    def _ending(self) -> Exception:
        """Gives what the other replicas end with: that the engine was stopped, or which rank has failed."""
        failure = self._failure
        if failure is None:
            return EngineStoppedError("the engine was shut down")
        if isinstance(failure, RankLostError):
            return failure
        return RankLostError(f"rank {self._own_name} failed: {type(failure).__name__}: {failure}")

    async def shutdown(self) -> None:
        """See Engine. Replicas that take their steps together come to rest first: none waits in a step."""
        if self._lockstep is not None and self._is_started and not self._is_stopping:
            try:
                with anyio.move_on_after(DRAIN_S), suppress(EngineDeadError, EngineStoppedError):
                    await self.pause()
            finally:
                await super().shutdown()
        else:
            await super().shutdown()

    # ---- the other replicas --------------------------------------------------------------------

    async def took_output(self, link: ReplicaLink, output: Output) -> None:
        """See Listener."""
        while self._text.address.room < HEADROOM:
            await lowlevel.checkpoint()
        self._text.address.tell(link.output_of(output))
        self._note_prefixes(link.place, output.prefixes)

    def figures_changed(self, link: ReplicaLink, prefixes: PrefixReport | None) -> None:
        """See Listener."""
        self._note_prefixes(link.place, prefixes)
        self.routes.note()

    def _note_prefixes(self, place: int, report: PrefixReport | None) -> None:
        if report is not None:
            self._router.address.tell(PrefixesChanged(place, report))

    def step_begun(self, number: int) -> None:
        """See Listener."""
        assert self._lockstep is not None, "a step is begun together, and no experts are shared"
        self._lockstep.follow(number)
        self.replicas.take_part(is_awaited=True)
        self._gate.need()

    def _announce(self, number: int) -> None:
        self.replicas.to_all(StepBegun(number))
        self.replicas.take_part(is_awaited=True)

    def _note_change(self) -> None:
        """Also notes that no step is in flight, unless it has to begin one."""
        super()._note_change()
        if self._lockstep is not None and not self._lockstep.is_behind:
            self.replicas.take_part(is_awaited=False)

    async def losing(self, place: int) -> None:
        """See Listener."""
        await self._router.address.ask(DropRank(place))

    async def lost(self, silent: list[NewRequest], failed: list[RequestId], why: RankLostError) -> None:
        """See Listener. What had produced nothing there runs elsewhere; the rest has failed."""
        if self._is_stopping:
            return  # nobody waits any more
        never: list[TextSpec] = []
        """Of those that end before anything came of them, which the detokeniser has not heard of."""
        try:
            await self.queue(silent)
        except EngineBusy:
            never = [request.text for request in silent]
            failed = [*failed, *(spec.request_id for spec in never)]
        except EngineStoppedError:
            return
        endings = [Finished(request_id, "error", str(why)) for request_id in failed]
        now_s = anyio.current_time()
        batch = TokenBatch(never, [], pack_ints([]), pack_floats([]), endings, now_s)
        self._text.address.tell(batch)

    # ---- requests ------------------------------------------------------------------------------

    async def queue(self, requests: list[NewRequest]) -> None:
        """Queues requests, all of them or none, at the replicas that the router picks; see Engine."""
        self.check_alive()
        try:
            left = await self._send(requests)
            while left:  # to a replica that was lost since the router answered, which knows it by now
                left = await self._send(left)
        except BaseException:  # a cancel too leaves nothing queued, there or here
            self.close_requests([request.request_id for request in requests])
            raise

    async def _send(self, requests: list[NewRequest]) -> list[NewRequest]:
        """Sends requests where the router says; gives those that it has sent to a replica that is gone."""
        route = RouteRequests(
            [request.request_id for request in requests],
            [self._keys_of(request) for request in requests],
            tuple(_forked_from(requests)),
        )
        places = await self._alive(self._router.address, route)
        by_place: dict[int, list[NewRequest]] = {}
        for place, request in zip(places, requests, strict=True):
            by_place.setdefault(place, []).append(request)
        if own := by_place.pop(OWN_PLACE, []):
            await super().queue(own)
        gone: list[NewRequest] = []
        for place, there in by_place.items():
            link = self.replicas.links.get(place)
            if link is None:
                gone += there
            else:
                link.queue(there)
        return gone

    def _keys_of(self, request: NewRequest) -> list[bytes]:
        keys: list[bytes] = []
        if self._prefix_changes is not None:
            extend_keys(keys, unpack_ints(request.prompt), self.config.block_size, root_of(request.salt))
        return keys

    def _take_closed(self) -> list[RequestId]:
        closed = super()._take_closed()
        if closed:
            self._router.address.tell(RequestsEnded(closed))
            for link in self.replicas.links.values():
                link.close(closed)
        return closed

    async def _note_batch(self, batch: TokenBatch) -> None:
        """Tells the router what a step of any replica has ended, and what its own has cached."""
        if batch.finished:
            self._router.address.tell(RequestsEnded([each.request_id for each in batch.finished]))
        await self._report_prefixes()

    async def _report_prefixes(self) -> None:
        if self._prefix_changes is not None and len(self._prefix_changes):
            self._note_prefixes(OWN_PLACE, await self._allocator.address.ask(ReportPrefixes()))

    # ---- lifecycle -----------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """See Engine; every replica comes to rest."""
        await self._everywhere("pause", partial(super().pause, mode), mode=check_pause_mode(mode))

    async def unpause(self) -> None:
        """See Engine; every replica goes on."""
        await self._everywhere("unpause", super().unpause)

    async def suspend(self) -> None:
        """See Engine; every replica gives its memory back."""
        if self._lockstep is not None:
            await self.pause()  # a replica without its cache takes part in no step
        await self._everywhere("suspend", super().suspend)
        await self._report_prefixes()

    async def resume(self) -> None:
        """See Engine; every replica takes its memory again."""
        await self._everywhere("resume", super().resume)

    def go_on(self) -> None:
        """See Engine; every replica goes on."""
        self.replicas.order("resume", mode="", epoch=0)
        self.replicas.order("unpause", mode="", epoch=0)
        super().go_on()

    async def set_generation_epoch(self, epoch: object) -> None:
        """See Engine; every replica stamps what it generates."""
        number = check_epoch(epoch)
        own = partial(super().set_generation_epoch, number)
        await self._everywhere("set_generation_epoch", own, epoch=number)
        await self._report_prefixes()

    async def _everywhere(
        self, call: OrderedCall, own: Callable[[], Awaitable[None]], *, mode: str = "", epoch: int = 0
    ) -> None:
        """Makes a call of every replica, its own included; raises what one raised, once all have done."""
        self.check_alive()
        errors: list[LifecycleError] = []
        for done in [own, *self.replicas.order(call, mode=mode, epoch=epoch)]:
            try:
                await done()
            except LifecycleError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _forked_from(requests: list[NewRequest]) -> list[RequestId | None]:
    """Gives for each the first with its prompt, where forks share that one's blocks."""
    first: dict[tuple[bytes, str], RequestId] = {}
    sources: list[RequestId | None] = []
    for request in requests:
        source = None
        if request.shares_prefix:
            source = first.setdefault((request.prompt, request.salt), request.request_id)
        sources.append(None if source == request.request_id else source)
    return sources


def _sum_of(all_stats: list[EngineStats]) -> EngineStats:
    """Adds up the figures of several engines; the times of a step are those of the first."""
    if len(all_stats) == 1:
        return all_stats[0]
    summed = {
        field: sum(getattr(stats, field) for stats in all_stats)
        for field in EngineStats.__struct_fields__
        if field not in ("prefix_hit_rate", "last_step", "all_steps")
    }
    rate = summed["prefix_hit_tokens"] / max(summed["prefix_query_tokens"], 1)
    return structs.replace(all_stats[0], prefix_hit_rate=rate, **summed)
