"""The engine's lifecycle as one table. Pure; knows no actor, no loop, no request.

`decide` says what a call gets in a phase, `advance` where an event leads. `Lifecycle` keeps the
calls that wait for it: each gets exactly one answer, in the order of the calls, as if every call
had been made after the one before it was answered. Only `shutdown` does not wait its turn.
"""

from collections import deque
from enum import StrEnum
from typing import assert_never

from msgspec import Struct

from megallm.core_async.errors import EngineDeadError, EngineStoppedError, LifecycleError, MegaLLMError


class Phase(StrEnum):
    """Where the engine is; those that end in -ing pass into another by themselves, save `running`."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    UNPAUSING = "unpausing"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Call(StrEnum):
    """What the user may ask for."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    SHUTDOWN = "shutdown"


class PauseMode(StrEnum):
    """What a pause does with the requests in flight.

    A pause that comes while another is under way, or after it, joins it as it is: requests that
    are frozen can't finish. Only `abort` takes effect on top of any other: it ends them, also
    those that are being waited for or are frozen already.
    """

    KEEP = "keep"
    """They are frozen after the step in flight, and go on when the engine runs again."""
    WAIT = "wait"
    """They run to their end first."""
    ABORT = "abort"
    """They end with what they have."""


def check_pause_mode(mode: str) -> str:
    """Gives a mode of `pause`. Raises: ValueError for what is none."""
    if mode not in {str(each) for each in PauseMode}:
        raise ValueError(f'mode is {mode!r}; it must be "keep", "wait" or "abort"')
    return mode


class Event(StrEnum):
    """What the engine's parts report; each ends one transition."""

    STARTED = "started"
    DRAINED = "drained"
    """No step is in flight, and for `PauseMode.WAIT` no request is left."""
    RESUMED_WORK = "resumed_work"
    CACHE_RELEASED = "cache_released"
    CACHE_RESTORED = "cache_restored"
    ACTORS_STOPPED = "actors_stopped"
    """Whether or not anybody called `shutdown`: a cancel from outside stops them as well."""
    FAILED = "failed"


# ---- what a call gets ----------------------------------------------------------------------------


class Done(Struct, frozen=True):
    """It is so already: reply at once."""


class Begin(Struct, frozen=True):
    """Enter the phase, and reply when the transition has ended."""

    phase: Phase


class Detour(Struct, frozen=True):
    """Enter the phase, and decide about the call again when the transition has ended."""

    phase: Phase


class Join(Struct, frozen=True):
    """Just that is under way: reply when the transition has ended."""


class Postpone(Struct, frozen=True):
    """Another transition is under way: decide about the call again when it has ended."""


class Refuse(Struct, frozen=True):
    """Reply with an error."""

    error: type[LifecycleError | EngineStoppedError | EngineDeadError]
    remedy: str = ""


type Outcome = Done | Begin | Detour | Join | Postpone | Refuse

_TOO_EARLY = Refuse(LifecycleError, "call resume() first")
_STOPPED = Refuse(EngineStoppedError)
_FAILED = Refuse(EngineDeadError)
_COLUMNS = (Call.PAUSE, Call.UNPAUSE, Call.SUSPEND, Call.RESUME, Call.SHUTDOWN)
_STOP = Begin(Phase.STOPPING)
_TABLE: dict[Phase, tuple[Outcome, Outcome, Outcome, Outcome, Outcome]] = {
    Phase.STARTING: (Postpone(), Postpone(), Postpone(), Postpone(), _STOP),
    Phase.RUNNING: (Begin(Phase.PAUSING), Done(), Detour(Phase.PAUSING), Done(), _STOP),
    Phase.PAUSING: (Join(), Postpone(), Postpone(), Postpone(), _STOP),
    Phase.PAUSED: (Done(), Begin(Phase.UNPAUSING), Begin(Phase.SUSPENDING), Done(), _STOP),
    Phase.UNPAUSING: (Postpone(), Join(), Postpone(), Postpone(), _STOP),
    Phase.SUSPENDING: (Postpone(), Postpone(), Join(), Postpone(), _STOP),
    Phase.SUSPENDED: (Done(), _TOO_EARLY, Done(), Begin(Phase.RESUMING), _STOP),
    Phase.RESUMING: (Postpone(), Postpone(), Postpone(), Join(), _STOP),
    Phase.STOPPING: (_STOPPED, _STOPPED, _STOPPED, _STOPPED, Join()),
    Phase.STOPPED: (_STOPPED, _STOPPED, _STOPPED, _STOPPED, Done()),
    Phase.FAILED: (_FAILED, _FAILED, _FAILED, _FAILED, Done()),
}
_ENDS: dict[Phase, tuple[Event, Phase]] = {
    Phase.STARTING: (Event.STARTED, Phase.RUNNING),
    Phase.PAUSING: (Event.DRAINED, Phase.PAUSED),
    Phase.UNPAUSING: (Event.RESUMED_WORK, Phase.RUNNING),
    Phase.SUSPENDING: (Event.CACHE_RELEASED, Phase.SUSPENDED),
    Phase.RESUMING: (Event.CACHE_RESTORED, Phase.PAUSED),
    Phase.STOPPING: (Event.ACTORS_STOPPED, Phase.STOPPED),
}
"""What ends each transition, and where it ends."""


def decide(phase: Phase, call: Call) -> Outcome:
    """Says what a call gets in a phase."""
    return _TABLE[phase][_COLUMNS.index(call)]


def advance(phase: Phase, event: Event) -> Phase:
    """Says where an event leads; the same phase when the event comes too late to matter.

    The end is final, and nothing but the end of the actors matters while they stop.
    """
    if phase in (Phase.STOPPED, Phase.FAILED):
        return phase
    if event is Event.FAILED:
        return Phase.FAILED
    if event is Event.ACTORS_STOPPED:
        return Phase.STOPPED
    if phase is Phase.STOPPING:
        return phase
    awaited, end = _ENDS.get(phase, (None, phase))
    assert event is awaited, f"{event} was reported while the engine was {phase}, which waits for {awaited}"
    return end


def legal_calls(phase: Phase) -> list[Call]:
    """Gives the calls that are not refused in a phase."""
    return [call for call in Call if not isinstance(decide(phase, call), Refuse)]


def refusal(phase: Phase, call: Call, refuse: Refuse) -> MegaLLMError:
    """Makes the error that a refused call ends with; an EngineDeadError still lacks its cause."""
    legal = ", ".join(f"{each}()" for each in legal_calls(phase))
    text = f"{call}() can't run while the engine is {phase}"
    return refuse.error(
        f"{text}; {refuse.remedy} (legal: {legal})" if refuse.remedy else f"{text} (legal: {legal})"
    )


# ---- the calls that wait -------------------------------------------------------------------------


class Enter(Struct, frozen=True):
    """The engine is in this phase now: begin its work, whose end is reported as an event.

    `pausing` is entered a second time when an abort overtakes a pause under way.
    """

    phase: Phase
    mode: PauseMode | None = None
    """For `pausing` only."""


class AbortRequests(Struct, frozen=True):
    """End all requests with what they have; no step is in flight."""


class Reply[C](Struct, frozen=True):
    """The call is done."""

    caller: C


class Fail[C](Struct, frozen=True):
    """The call ends with this error."""

    caller: C
    error: MegaLLMError


type Step[C] = Enter | AbortRequests | Reply[C] | Fail[C]
"""What the owner of a `Lifecycle` does next, in order."""


class _Waiting[C](Struct, frozen=True):
    caller: C
    call: Call
    mode: PauseMode


class Lifecycle[C]:
    """The phase and the calls that wait for it. C is whatever the owner replies through."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._mode = PauseMode.KEEP
        """Of the transition under way; other than `keep` only for a pause."""
        self._undecided: deque[_Waiting[C]] = deque()
        self._joined: list[_Waiting[C]] = []
        """Those who are answered when the transition under way ends."""

    def call(self, caller: C, call: Call, mode: PauseMode = PauseMode.KEEP) -> list[Step[C]]:
        """Takes a call; `mode` is for `pause` only."""
        assert call is Call.PAUSE or mode is PauseMode.KEEP, f"{call} has no mode {mode}"
        steps: list[Step[C]] = []
        waiting = _Waiting(caller, call, mode)
        if call is Call.SHUTDOWN:
            self._try(waiting, steps)
        else:
            self._undecided.append(waiting)
            self._go_on(steps)
        return steps

    def report(self, event: Event) -> list[Step[C]]:
        """Takes an event."""
        phase = advance(self.phase, event)
        if phase is self.phase:
            return []
        self.phase = phase
        steps: list[Step[C]] = [Enter(phase)]
        if phase in (Phase.STOPPED, Phase.FAILED):
            self._end_all(steps)
            return steps
        if self._mode is PauseMode.ABORT:
            steps.append(AbortRequests())
        steps += [Reply(waiting.caller) for waiting in self._joined]
        self._joined.clear()
        self._go_on(steps)
        return steps

    def _go_on(self, steps: list[Step[C]]) -> None:
        """Decides about the calls in their order, up to the first that has to wait."""
        while self._undecided and self._try(self._undecided[0], steps):
            self._undecided.popleft()

    def _try(self, waiting: _Waiting[C], steps: list[Step[C]]) -> bool:
        """Decides about a call; says whether that is settled or it has to be decided again."""
        outcome = decide(self.phase, waiting.call)
        match outcome:
            case Done():
                if waiting.mode is PauseMode.ABORT:
                    steps.append(AbortRequests())
                steps.append(Reply(waiting.caller))
            case Begin(phase):
                self._enter(phase, waiting.mode, steps)
                self._joined.append(waiting)
            case Join():
                if waiting.mode is PauseMode.ABORT and self._mode is not PauseMode.ABORT:
                    self._enter(self.phase, waiting.mode, steps)
                self._joined.append(waiting)
            case Refuse():
                steps.append(Fail(waiting.caller, refusal(self.phase, waiting.call, outcome)))
            case Detour(phase):
                self._enter(phase, PauseMode.KEEP, steps)
                return False
            case Postpone():
                return False
            case _:
                assert_never(outcome)
        return True

    def _enter(self, phase: Phase, mode: PauseMode, steps: list[Step[C]]) -> None:
        self.phase = phase
        self._mode = mode
        steps.append(Enter(phase, mode if phase is Phase.PAUSING else None))
        if phase is Phase.STOPPING:
            self._end_all(steps)

    def _end_all(self, steps: list[Step[C]]) -> None:
        """Answers every call that waits: nothing but the end follows."""
        for waiting in [*self._joined, *self._undecided]:
            outcome = decide(self.phase, waiting.call)
            if isinstance(outcome, Refuse):
                steps.append(Fail(waiting.caller, refusal(self.phase, waiting.call, outcome)))
            else:
                steps.append(Reply(waiting.caller))
        self._joined.clear()
        self._undecided.clear()
