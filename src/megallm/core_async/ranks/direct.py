"""Direct mode over several ranks: every rank's program makes every call, and gets what comes of it.

One rank leads all the same: it queues what all have asked for, and what its steps give goes to the others,
who make the text of it for their own readers.
"""

import hashlib
from collections.abc import Callable, Sequence

import anyio
import msgspec
from msgspec import structs

from megallm.core_async.actors.detokenizer import Detokenizer, OutputActor, Parcel
from megallm.core_async.actors.worker import WorkerActor
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Finished,
    NewRequest,
    RequestId,
    TextSpec,
    TokenBatch,
    pack_floats,
    pack_ints,
)
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.calls import LeaderCalls
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.shared_detokenizer import SharedDetokenizer
from megallm.core_async.ranks.together import Together
from megallm.core_async.transport.rank_frames import Gave
from megallm.core_async.transport.routes import shifted


def call_of(requests: Sequence[NewRequest]) -> str:
    """Gives what a submission is called among ranks: they differ where the requests do."""
    digest = hashlib.sha256(msgspec.msgpack.encode(requests)).hexdigest()[:12]
    return f"generate({len(requests)} requests, {digest})"


class DirectLeader(Engine):
    """The engine of the rank that leads."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        others: list[Together],
        *,
        make_worker: Callable[[Runner], WorkerActor],
    ) -> None:
        """`others`: those that follow, once the engine has started."""
        super().__init__(config, runner, tokenizer, make_worker=make_worker)
        self._others = others
        self.calls = LeaderCalls(self, others)
        """The calls of this rank's program."""

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """See Engine; waits until every rank's program has asked for the same.

        Raises: also LifecycleError where one has asked for something else.
        """
        opened: list[Outbox[Parcel]] = []

        async def queue() -> None:
            opened.append(await Engine.submit(self, requests))

        try:
            await self.calls.together(call_of(requests), queue)
        except BaseException:  # a cancel too leaves nothing queued
            for outbox in opened:
                outbox.close()
            raise
        return opened[0]

    def _make_detokenizer(self) -> OutputActor:
        return SharedDetokenizer(
            self._tokenizer.detokenize, self._outboxes, self.times, self.routes, on_batch=self._share
        )

    async def _share(self, batch: TokenBatch) -> None:
        for other in self._others:
            other.to_all(Gave(batch))

    def _take_closed(self) -> list[RequestId]:
        """Also tells the other ranks: theirs end with what they have, unless they have ended."""
        closed = super()._take_closed()
        if closed:
            endings = [Finished(request_id, "abort") for request_id in closed]
            batch = TokenBatch([], [], pack_ints([]), pack_floats([]), endings, anyio.current_time())
            for other in self._others:
                other.to_all(Gave(batch))
        return closed


class DirectFollower(Follower):
    """The engine of a rank that follows, and has readers of its own."""

    def _build(self) -> None:
        super()._build()
        self._outboxes = Outboxes[Parcel](self._forget_closed)
        self._own_detokenizer = Detokenizer(self._tokenizer.detokenize, self._outboxes, self.times)
        self._not_started: dict[RequestId, TextSpec] = {}
        """Of requests that nothing has come of yet: one may end so, by the leader's abort."""

    async def _start(self, supervisor: Supervisor) -> None:
        await supervisor.start("detokenizer", self._own_detokenizer.run)
        await super()._start(supervisor)

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """See DirectLeader: it comes back once the leader has queued them."""
        self.check_alive()
        outbox = self._outboxes.open([request.request_id for request in requests])
        self._not_started.update((request.request_id, request.text) for request in requests)
        try:
            await self.call_made(call_of(requests))
        except BaseException:  # a cancel too leaves nobody reading
            outbox.close()
            raise
        return outbox

    def _take_output(self, batch: TokenBatch) -> None:
        """Takes the leader's output, with the times of this rank's loop."""
        for spec in batch.started:
            self._not_started.pop(spec.request_id, None)
        never = [self._not_started.pop(each.request_id, None) for each in batch.finished]
        started = [*batch.started, *(spec for spec in never if spec is not None)]
        whole = structs.replace(batch, started=started)
        self._own_detokenizer.address.tell(shifted(whole, anyio.current_time() - batch.time_s))

    def _forget_closed(self) -> None:
        """Leaves it at that: the leader's readers alone end a request early."""
        for key in self._outboxes.take_closed():
            self._not_started.pop(RequestId(key), None)
