"""The coordinator's books of one replica: what is there, what was, and what is left when it is gone."""

import socket

import anyio
import pytest

from megallm.core_async.errors import LifecycleError
from megallm.core_async.messages import (
    EngineStats,
    Finished,
    NewRequest,
    RequestId,
    TextSpec,
    TokenBatch,
    pack_floats,
    pack_ints,
)
from megallm.core_async.ranks.replica_link import ReplicaLink, loop_ahead_s
from megallm.core_async.transport.frames import fault_of
from megallm.core_async.transport.ranks import RankStream
from megallm.core_async.transport.replica_frames import (
    FROM_COORDINATOR,
    FROM_REPLICA,
    Close,
    FromCoordinator,
    FromReplica,
    Order,
    OrderDone,
    Output,
    Queue,
)
from tests.engines import GREEDY
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


def request_of(number: int) -> NewRequest:
    """Gives a request."""
    return NewRequest(
        request_id=RequestId(number),
        prompt=pack_ints([1]),
        max_new_tokens=3,
        stop_token_ids=(),
        sampling=GREEDY,
        text=TextSpec(request_id=RequestId(number)),
    )


def output(*, started: list[int] | None = None, finished: list[int] | None = None) -> Output:
    """Gives what a step gave, at second 10 of the replica's clock."""
    specs = [request_of(number).text for number in started or []]
    endings = [
        Finished(RequestId(number), "stop", events=(("add_context", 9.0),)) for number in finished or []
    ]
    batch = TokenBatch(specs, [], pack_ints([]), pack_floats([]), endings, 10.0)
    return Output(batch, EngineStats(running=3))


class Ends:
    """A link, and the replica's end of its socket."""

    def __init__(self) -> None:
        left, right = socket.socketpair()
        self.link = ReplicaLink(1, RankStream[FromReplica](left, 4, FROM_REPLICA), 0)
        self.replica = RankStream[FromCoordinator](right, 0, FROM_COORDINATOR)

    def close(self) -> None:
        """Closes both ends."""
        self.link.stream.close()
        self.replica.close()


async def test_what_ended_is_not_there_any_more() -> None:
    """Only what has produced nothing may run again elsewhere."""
    ends = Ends()
    ends.link.queue([request_of(number) for number in (1, 2, 3, 4)])
    ends.link.output_of(output(started=[1, 2], finished=[2]))
    ends.link.close([RequestId(1), RequestId(4), RequestId(9)])
    assert await ends.replica.receive() == [
        Queue([request_of(number) for number in (1, 2, 3, 4)]),
        Close([RequestId(1), RequestId(4)]),
    ]
    assert ends.link.stats.running == 3
    assert ends.link.lose() == ([request_of(3)], [RequestId(1)])
    assert ends.link.lose() == ([], [])
    ends.close()


async def test_times_are_those_of_the_coordinators_clock() -> None:
    """Another machine's clock may have started at any time."""
    ends = Ends()
    ends.link.ahead_s = loop_ahead_s(anyio.current_time() - 100.0)
    batch = ends.link.output_of(output(finished=[1]))
    assert batch.time_s == pytest.approx(110.0, abs=1.0)
    assert batch.finished[0].events[0][1] == pytest.approx(109.0, abs=1.0)
    ends.close()


async def test_an_order_is_answered_by_its_number_and_a_loss_answers_all() -> None:
    """Nobody waits for a replica that has gone: it is paused enough."""
    ends = Ends()
    pausing, resuming, left = (ends.link.order(call) for call in ("pause", "resume", "suspend"))
    assert await ends.replica.receive() == [Order(0, "pause"), Order(1, "resume"), Order(2, "suspend")]
    ends.link.done(OrderDone(1, fault_of(LifecycleError("no"))))
    ends.link.done(OrderDone(0))
    await pausing.wait()
    with pytest.raises(LifecycleError, match="no"):
        await resuming.wait()
    ends.link.lose()
    await left.wait()
    ends.close()
