"""Every frame between the coordinator and a replica survives the wire, and is of its own kind there."""

import pytest
from msgspec import Struct

from megallm.core_async.messages import (
    EngineStats,
    Finished,
    NewRequest,
    PrefixReport,
    RequestId,
    Sampling,
    TextSpec,
    TokenBatch,
    pack_floats,
    pack_ints,
)
from megallm.core_async.transport.frames import Fault
from megallm.core_async.transport.framing import FrameReader
from megallm.core_async.transport.rank_frames import (
    AskWhere,
    CallEnded,
    CallMade,
    End,
    Failed,
    Go,
    Here,
    Join,
)
from megallm.core_async.transport.ranks import encoded
from megallm.core_async.transport.replica_frames import (
    Close,
    Figures,
    FromCoordinator,
    FromReplica,
    Order,
    OrderDone,
    Output,
    Queue,
    ReplicaStarted,
    StepBegun,
)

FAULT = Fault("ValueError", "no", None)
ONE = RequestId(1)
REQUEST = NewRequest(
    request_id=ONE,
    prompt=pack_ints([1, 2]),
    max_new_tokens=3,
    stop_token_ids=(4,),
    sampling=Sampling(temperature=0.5, seed=2**62),
    text=TextSpec(request_id=ONE, stop_words=("a",)),
)
BATCH = TokenBatch(
    started=[REQUEST.text],
    requests=[ONE],
    tokens=pack_ints([5]),
    log_probs=pack_floats([-0.5]),
    finished=[Finished(ONE, "stop", 4)],
    time_s=1.5,
)


@pytest.mark.parametrize(
    "frame",
    [
        Go(),
        Queue([REQUEST]),
        Close([ONE]),
        Order(1, "pause", mode="wait"),
        Order(2, "set_generation_epoch", epoch=7),
        CallEnded(1, FAULT),
        StepBegun(9),
        AskWhere(),
        Here(0),
        End(FAULT),
    ],
)
def test_what_the_coordinator_says_survives_the_wire(frame: Struct) -> None:
    """Requests with all that was asked for."""
    assert FrameReader[FromCoordinator](FromCoordinator.__value__).feed(bytes(encoded(frame))) == [frame]


@pytest.mark.parametrize(
    "frame",
    [
        Join(1, bytes(32)),
        ReplicaStarted(3.5),
        Output(BATCH, EngineStats(step=3), PrefixReport([b"k"], [b"f"], is_flushed=True)),
        Output(BATCH, EngineStats()),
        Figures(EngineStats(running=2)),
        OrderDone(1, FAULT),
        CallMade(0, "pause"),
        StepBegun(9),
        AskWhere(),
        Here(0),
        Failed(FAULT),
    ],
)
def test_what_a_replica_says_survives_the_wire(frame: Struct) -> None:
    """Column for column."""
    assert FrameReader[FromReplica](FromReplica.__value__).feed(bytes(encoded(frame))) == [frame]
