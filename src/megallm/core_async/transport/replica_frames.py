"""What the coordinator and the engines of the other replicas say to each other, as tagged Structs.

Requests go out as they come, and one `Output` a step comes back from each replica. Loop times are the
sender's own: a `ReplicaStarted` says how its clock stands.
"""

from typing import Literal

from msgspec import Struct

from megallm.core_async.messages import EngineStats, NewRequest, PrefixReport, RequestId, TokenBatch
from megallm.core_async.transport.frames import Fault
from megallm.core_async.transport.framing import Kinds
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

type OrderedCall = Literal["pause", "unpause", "suspend", "resume", "set_generation_epoch"]

# ---- both ways ---------------------------------------------------------------------------------


class StepBegun(Struct, frozen=True, tag=True, array_like=True):
    """Some replica has begun the step of that number, which all take together; see plan/lockstep.py."""

    number: int


# ---- from the coordinator ----------------------------------------------------------------------


class Queue(Struct, frozen=True, tag=True, array_like=True):
    """Run these; there is room for them."""

    requests: list[NewRequest]


class Close(Struct, frozen=True, tag=True, array_like=True):
    """Nobody reads these any more; some may have ended."""

    requests: list[RequestId]


class Order(Struct, frozen=True, tag=True, array_like=True):
    """Make a call of the lifecycle; answered by `OrderDone`."""

    number: int
    call: OrderedCall
    mode: str = "keep"
    """Of `pause` alone."""
    epoch: int = 0
    """Of `set_generation_epoch` alone."""


type FromCoordinator = Go | Queue | Close | Order | CallEnded | StepBegun | AskWhere | Here | End
FROM_COORDINATOR = Kinds[FromCoordinator](FromCoordinator.__value__)

# ---- to the coordinator ------------------------------------------------------------------------


class ReplicaStarted(Struct, frozen=True, tag=True, array_like=True):
    """Every rank of the replica has the model and its cache."""

    now_s: float
    """The sender's loop time."""


class Output(Struct, frozen=True, tag=True, array_like=True):
    """What one step gave, and how the replica stands after it."""

    batch: TokenBatch
    stats: EngineStats
    prefixes: PrefixReport | None = None
    """What became of the prefix cache, where that matters to the routing."""


class Figures(Struct, frozen=True, tag=True, array_like=True):
    """How the replica stands, where no step's output says so: it has come to rest."""

    stats: EngineStats
    prefixes: PrefixReport | None = None
    """As in `Output`."""


class OrderDone(Struct, frozen=True, tag=True, array_like=True):
    """An order was carried out, or why it was not."""

    number: int
    fault: Fault | None = None


type FromReplica = (
    Join | ReplicaStarted | Output | Figures | OrderDone | CallMade | StepBegun | AskWhere | Here | Failed
)
FROM_REPLICA = Kinds[FromReplica](FromReplica.__value__)
