"""What the engine's process and a front end say to each other, as tagged Structs.

Times on the wire are those of `time.monotonic`, one clock for all processes of a machine: the clock
of a loop may start anywhere.
"""

from typing import Final, Literal

from msgspec import Struct

from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import (
    EngineBusy,
    EngineDeadError,
    EngineStoppedError,
    InvalidRequestError,
    LifecycleError,
    MegaLLMError,
    NoProfilerError,
    RankLostError,
    UnsupportedModelError,
)
from megallm.core_async.messages import EngineStats, NewRequest, RequestId, TokenBatch

type EngineCall = Literal["pause", "unpause", "suspend", "resume", "profile"]

# ---- from a front end --------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True, array_like=True):
    """The front end answers its port."""


class SubmitRequests(Struct, frozen=True, tag=True, array_like=True):
    """Queue these, all of them or none."""

    call: int
    requests: list[NewRequest]


class CloseRequests(Struct, frozen=True, tag=True, array_like=True):
    """Nobody reads these any more; some may have ended."""

    requests: list[RequestId]


class CallEngine(Struct, frozen=True, tag=True, array_like=True):
    """Make one of an administrator's calls."""

    call: int
    method: EngineCall
    argument: str = ""
    """The mode of `pause`, the action of `profile`."""


class AbortElsewhere(Struct, frozen=True, tag=True, array_like=True):
    """An administrator aborts: tell the other front ends; see AbortHere."""

    request_id: str | None


type FromFrontend = Ready | SubmitRequests | CloseRequests | CallEngine | AbortElsewhere

# ---- to a front end ----------------------------------------------------------------------------


class Fault(Struct, frozen=True, array_like=True):
    """An error as it crosses a process: the class by its name, and the text of what caused it."""

    kind: str
    message: str
    cause: str | None = None


class Welcome(Struct, frozen=True, tag=True, array_like=True):
    """The first frame: whom the front end talks to, and what it is to be."""

    owner: int
    """Its request ids say so; see `routes.py`."""
    config: EngineConfig
    stats: EngineStats
    phase: str
    setup: bytes
    """msgpack of what the server tells its front ends."""


class StepOutput(Struct, frozen=True, tag=True, array_like=True):
    """What one step gave for the front end's requests."""

    batch: TokenBatch
    stats: EngineStats


class EngineState(Struct, frozen=True, tag=True, array_like=True):
    """The engine's figures and phase have changed."""

    stats: EngineStats
    phase: str


class Answer(Struct, frozen=True, tag=True, array_like=True):
    """What came of a call."""

    call: int
    phase: str
    fault: Fault | None = None


class EngineEnded(Struct, frozen=True, tag=True, array_like=True):
    """The engine has failed or was stopped: nothing more comes."""

    fault: Fault
    phase: str


class Drain(Struct, frozen=True, tag=True, array_like=True):
    """Stop accepting, let what is under way finish for so long, and exit."""

    timeout_s: float


class AbortHere(Struct, frozen=True, tag=True, array_like=True):
    """End the HTTP requests of an X-Request-Id, or all; another front end was asked to."""

    request_id: str | None


type ToFrontend = Welcome | StepOutput | EngineState | Answer | EngineEnded | Drain | AbortHere

# ---- errors ------------------------------------------------------------------------------------


class RemoteFailureError(Exception):
    """What an error's cause said of itself in the engine's process."""


_KINDS: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        EngineBusy,
        EngineDeadError,
        EngineStoppedError,
        InvalidRequestError,
        LifecycleError,
        NoProfilerError,
        RankLostError,
        UnsupportedModelError,
        ValueError,
    )
}


def fault_of(error: Exception) -> Fault:
    """Gives an error as it crosses a process."""
    cause = error.__cause__
    return Fault(type(error).__name__, str(error), None if cause is None else repr(cause))


def error_of(fault: Fault) -> Exception:
    """Gives a new error that says what the fault says."""
    error = _KINDS.get(fault.kind, MegaLLMError)(fault.message)
    if fault.cause is not None:
        error.__cause__ = RemoteFailureError(fault.cause)
    return error
