"""Every frame between ranks survives the wire, and is of its own kind there."""

import pytest
from msgspec import Struct

from megallm.core_async.messages import Row, RowSetup, Sampling, StepPlan, pack_ints
from megallm.core_async.transport.frames import Fault
from megallm.core_async.transport.framing import FrameReader
from megallm.core_async.transport.rank_frames import (
    AskWhere,
    CacheChanged,
    CallEnded,
    CallMade,
    ChangeCache,
    End,
    Failed,
    FromFollower,
    FromLeader,
    Go,
    Here,
    Join,
    RunStep,
    Started,
)
from megallm.core_async.transport.ranks import encoded

PLAN = StepPlan(
    step=3,
    num_decode=1,
    rows=pack_ints([0, 1]),
    starts=pack_ints([5, 0]),
    lengths=pack_ints([1, 3]),
    samples=b"\1\1",
    tokens=pack_ints([7, 8, 9]),
    new_rows=[RowSetup(row=Row(1), sampling=Sampling(temperature=0.5, seed=2**63))],
    changed_rows=pack_ints([1]),
    changed_starts=pack_ints([0]),
    changed_counts=pack_ints([1]),
    blocks=pack_ints([4]),
)
FAULT = Fault("ValueError", "no", None)


@pytest.mark.parametrize(
    "frame",
    [
        Go(),
        RunStep(PLAN),
        ChangeCache(is_release=True, kept=pack_ints([0, 7, 200_000])),
        ChangeCache(is_release=False),
        CallEnded(1),
        CallEnded(2, FAULT),
        AskWhere(),
        Here(4),
        End(FAULT),
    ],
)
def test_what_a_leader_says_survives_the_wire(frame: Struct) -> None:
    """Column for column."""
    assert FrameReader[FromLeader](FromLeader.__value__).feed(bytes(encoded(frame))) == [frame]


@pytest.mark.parametrize(
    "frame",
    [Join(1, bytes(32)), Started(), CacheChanged(), CallMade(0, "pause"), AskWhere(), Here(4), Failed(FAULT)],
)
def test_what_a_follower_says_survives_the_wire(frame: Struct) -> None:
    """Errors as a class and a text."""
    assert FrameReader[FromFollower](FromFollower.__value__).feed(bytes(encoded(frame))) == [frame]
