"""What the leader of some ranks and the others say to each other, as tagged Structs.

One `RunStep` to each rank is all that a step costs; no answer to it is sent.
"""

from msgspec import Struct

from megallm.core_async.messages import Ints, StepPlan, TokenBatch
from megallm.core_async.transport.frames import Fault
from megallm.core_async.transport.framing import Kinds

# ---- both ways ---------------------------------------------------------------------------------


class AskWhere(Struct, frozen=True, tag=True, array_like=True):
    """A step takes long: are you there? Either side may ask."""


class Here(Struct, frozen=True, tag=True, array_like=True):
    """The answer to `AskWhere`: the rank's loop runs."""

    num_steps: int
    """Steps that the rank has run to their end."""


# ---- from the leader ---------------------------------------------------------------------------


class Go(Struct, frozen=True, tag=True, array_like=True):
    """Every rank has started."""


class RunStep(Struct, frozen=True, tag=True, array_like=True):
    """Run this plan, after those before it."""

    plan: StepPlan


class ChangeCache(Struct, frozen=True, tag=True, array_like=True):
    """Give the cache's memory back, or take it again; answered by `CacheChanged`."""

    is_release: bool
    kept: Ints = Ints(b"")
    """See `ReleaseCache`: each rank has the same blocks of its own layers."""


class Gave(Struct, frozen=True, tag=True, array_like=True):
    """What a step gave, where every rank's program has made the call that asked for it."""

    batch: TokenBatch


class CallEnded(Struct, frozen=True, tag=True, array_like=True):
    """The call that all ranks have made is over, and what came of it."""

    number: int
    fault: Fault | None = None


class End(Struct, frozen=True, tag=True, array_like=True):
    """The engine has failed or was stopped: nothing more comes."""

    fault: Fault


type FromLeader = Go | RunStep | ChangeCache | Gave | CallEnded | AskWhere | Here | End
FROM_LEADER = Kinds[FromLeader](FromLeader.__value__)

# ---- to the leader -----------------------------------------------------------------------------


class Join(Struct, frozen=True, tag=True, array_like=True):
    """The first frame: who it is, and the proof that it was told where to connect."""

    place: int
    secret: bytes


class Started(Struct, frozen=True, tag=True, array_like=True):
    """The rank has the model and its cache."""


class CacheChanged(Struct, frozen=True, tag=True, array_like=True):
    """`ChangeCache` was done."""


class CallMade(Struct, frozen=True, tag=True, array_like=True):
    """The rank's own program has made a call that all ranks make."""

    number: int
    name: str


class Failed(Struct, frozen=True, tag=True, array_like=True):
    """The rank can't go on, and why."""

    fault: Fault


type FromFollower = Join | Started | CacheChanged | CallMade | AskWhere | Here | Failed
FROM_FOLLOWER = Kinds[FromFollower](FromFollower.__value__)
