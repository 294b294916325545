"""One replica as the coordinator sees it: the socket to its engine, and what is there.

Owns the books of the replica's requests and orders. Knows frames; knows no router and no other replica.
"""

import itertools
import math
from collections.abc import Iterable

import anyio
from msgspec import Struct

from megallm.core_async.kit.reply import Reply
from megallm.core_async.messages import EngineStats, NewRequest, RequestId, TokenBatch
from megallm.core_async.ranks.watch import Awaited, Watch
from megallm.core_async.transport.frames import error_of
from megallm.core_async.transport.ranks import RankStream
from megallm.core_async.transport.replica_frames import (
    Close,
    FromReplica,
    Order,
    OrderDone,
    OrderedCall,
    Output,
    Queue,
)
from megallm.core_async.transport.routes import shifted


class ReplicaLink:
    """The coordinator's end. Called in its loop; but for `watch` nothing waits."""

    def __init__(self, place: int, stream: RankStream[FromReplica], own_name: int) -> None:
        """`place`: of the replica among all; `own_name`: the coordinator's global rank."""
        self.place = place
        self.stream = stream
        self.stats = EngineStats()
        """The replica's figures, as it told them last."""
        self.ahead_s = 0.0
        """How far this loop's clock is ahead of the replica's."""
        self.watch = Watch([stream], own_name, step_s=math.inf)
        self.awaited = Awaited()
        """Requests and orders that are there: the replica is watched meanwhile."""
        self._requests: dict[RequestId, NewRequest | None] = {}
        """Those that have not ended, in the order they went there; None once one can't run elsewhere: it
        has produced a token."""
        self._takes_part = False
        self._orders: dict[int, Reply[None]] = {}
        self._numbers = itertools.count()

    @property
    def name(self) -> int:
        """The global rank that leads the replica."""
        return self.stream.name

    def tell(self, frame: Struct) -> None:
        """Tells the replica."""
        self.stream.put(frame)

    def queue(self, requests: list[NewRequest]) -> None:
        """Sends requests there."""
        self._requests.update((request.request_id, request) for request in requests)
        self.tell(Queue(requests))
        self._count()

    def close(self, requests: Iterable[RequestId]) -> None:
        """Says that nobody reads some requests any more, of which any may be here or elsewhere.

        One that has produced something stays in the books until the replica says that it has ended.
        """
        closed = [request_id for request_id in requests if request_id in self._requests]
        if closed:
            for request_id in closed:
                if self._requests[request_id] is not None:
                    del self._requests[request_id]
            self.tell(Close(closed))
            self._count()

    def take_part(self, *, is_awaited: bool) -> None:
        """Notes whether others wait for the replica in a step that all take together."""
        self._takes_part = is_awaited
        self._count()

    def order(self, call: OrderedCall, *, mode: str = "keep", epoch: int = 0) -> Reply[None]:
        """Has the replica make a call of the lifecycle; the reply comes when it is done."""
        number = next(self._numbers)
        reply = self._orders[number] = Reply[None]()
        self.tell(Order(number, call, mode, epoch))
        self._count()
        return reply

    def done(self, answer: OrderDone) -> None:
        """Notes that an order was carried out, or why not."""
        reply = self._orders.pop(answer.number)
        self._count()
        if answer.fault is None:
            reply.set(None)
        else:
            reply.fail(error_of(answer.fault))

    def output_of(self, output: Output) -> TokenBatch:
        """Notes what a step gave, and gives it with the times of this loop."""
        self.stats = output.stats
        batch = shifted(output.batch, self.ahead_s)
        requests = self._requests
        for spec in batch.started:
            if spec.request_id in requests:
                requests[spec.request_id] = None
        for ending in batch.finished:
            requests.pop(ending.request_id, None)
        self._count()
        return batch

    def lose(self) -> tuple[list[NewRequest], list[RequestId]]:
        """Notes that the replica is gone: gives the requests that had produced nothing, and the others.

        Who waits for an order waits no more: what is gone is paused enough.
        """
        silent = [request for request in self._requests.values() if request is not None]
        begun = [request_id for request_id, request in self._requests.items() if request is None]
        self._requests.clear()
        while self._orders:
            self._orders.popitem()[1].set(None)
        return silent, begun

    def _count(self) -> None:
        self.awaited.set(len(self._requests) + len(self._orders) + self._takes_part)


def loop_ahead_s(then_s: float) -> float:
    """Gives how far this loop's clock is ahead of one that said `then_s` just now."""
    return anyio.current_time() - then_s
