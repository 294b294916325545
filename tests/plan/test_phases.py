"""The lifecycle table, pair by pair, and its calls against a model that takes them one at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from megallm.core_async.errors import EngineDeadError, EngineStoppedError, LifecycleError
from megallm.core_async.plan.phases import (
    AbortRequests,
    Begin,
    Call,
    Detour,
    Done,
    Enter,
    Event,
    Fail,
    Join,
    Lifecycle,
    Outcome,
    PauseMode,
    Phase,
    Postpone,
    Refuse,
    Reply,
    Step,
    advance,
    decide,
    legal_calls,
)

STABLE = [Phase.RUNNING, Phase.PAUSED, Phase.SUSPENDED, Phase.STOPPED, Phase.FAILED]
"""Phases that no event is awaited in."""
AWAITED = {
    Phase.STARTING: Event.STARTED,
    Phase.PAUSING: Event.DRAINED,
    Phase.UNPAUSING: Event.RESUMED_WORK,
    Phase.SUSPENDING: Event.CACHE_RELEASED,
    Phase.RESUMING: Event.CACHE_RESTORED,
    Phase.STOPPING: Event.ACTORS_STOPPED,
}
"""What the engine's parts report sooner or later."""
LEADS_TO = {
    Event.STARTED: Phase.RUNNING,
    Event.DRAINED: Phase.PAUSED,
    Event.RESUMED_WORK: Phase.RUNNING,
    Event.CACHE_RELEASED: Phase.SUSPENDED,
    Event.CACHE_RESTORED: Phase.PAUSED,
    Event.ACTORS_STOPPED: Phase.STOPPED,
    Event.FAILED: Phase.FAILED,
}


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", Call)
@pytest.mark.parametrize("phase", Phase)
def test_every_call_has_an_outcome_in_every_phase(phase: Phase, call: Call) -> None:
    """A hole in the table is a call that hangs or an assert that kills the engine."""
    match decide(phase, call):
        case Done():
            assert phase in STABLE
        case Begin(begun):
            assert begun in AWAITED
            assert call is Call.SHUTDOWN or phase in STABLE
        case Detour(begun):
            assert isinstance(decide(begun, call), Postpone)
        case Join() | Postpone():
            assert phase in AWAITED
        case Refuse(error):
            assert issubclass(error, LifecycleError | EngineStoppedError | EngineDeadError)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_every_event_leads_somewhere_or_is_a_broken_invariant(phase: Phase, event: Event) -> None:
    """An event in the wrong phase means that two parts of the engine disagree about where it is."""
    if phase in (Phase.STOPPED, Phase.FAILED):
        assert advance(phase, event) is phase
    elif event in (Event.FAILED, Event.ACTORS_STOPPED) or event is AWAITED.get(phase):
        assert advance(phase, event) is LEADS_TO[event]
    elif phase is Phase.STOPPING:
        assert advance(phase, event) is phase
    else:
        with pytest.raises(AssertionError, match=f"{event} was reported while the engine was {phase}"):
            advance(phase, event)


@pytest.mark.parametrize(
    ("phase", "outcomes"),
    [
        (Phase.RUNNING, [Begin(Phase.PAUSING), Done(), Detour(Phase.PAUSING), Done()]),
        (Phase.PAUSED, [Done(), Begin(Phase.UNPAUSING), Begin(Phase.SUSPENDING), Done()]),
        (
            Phase.SUSPENDED,
            [Done(), Refuse(LifecycleError, "call resume() first"), Done(), Begin(Phase.RESUMING)],
        ),
        (Phase.STOPPED, [Refuse(EngineStoppedError)] * 4),
        (Phase.FAILED, [Refuse(EngineDeadError)] * 4),
    ],
)
def test_the_stable_phases_are_as_promised(phase: Phase, outcomes: list[Outcome]) -> None:
    """The public table of the lifecycle, row by row."""
    calls = [Call.PAUSE, Call.UNPAUSE, Call.SUSPEND, Call.RESUME]
    assert [decide(phase, call) for call in calls] == outcomes


@pytest.mark.parametrize(
    ("phase", "own"),
    [
        (Phase.STARTING, None),
        (Phase.PAUSING, Call.PAUSE),
        (Phase.UNPAUSING, Call.UNPAUSE),
        (Phase.SUSPENDING, Call.SUSPEND),
        (Phase.RESUMING, Call.RESUME),
    ],
)
def test_a_transition_is_joined_by_its_own_call_and_no_other_disturbs_it(
    phase: Phase, own: Call | None
) -> None:
    """Upstream asserts that no signal comes meanwhile, and dies when one does."""
    outcomes = {call: decide(phase, call) for call in Call}
    assert outcomes.pop(Call.SHUTDOWN) == Begin(Phase.STOPPING)
    assert outcomes == {call: Join() if call is own else Postpone() for call in outcomes}


@pytest.mark.parametrize("phase", Phase)
def test_shutdown_is_legal_everywhere(phase: Phase) -> None:
    """Whatever went wrong, the caller can always end it."""
    assert Call.SHUTDOWN in legal_calls(phase)


# ---- the calls that wait -------------------------------------------------------------------------


class Made(Struct):
    """A call as the test made it, and what came of it."""

    number: int
    call: Call
    mode: PauseMode
    answer: str | None = None
    num_aborts_before: int = 0


class Engine:
    """Stands for the lifecycle's owner: does the steps, and reports what it is told to."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle[Made]()
        self.made: list[Made] = []
        self.num_aborts = 0
        self.steps: list[Step[Made]] = []

    def call(self, call: Call, mode: PauseMode = PauseMode.KEEP) -> Made:
        """Makes a call."""
        made = Made(len(self.made), call, mode, None, self.num_aborts)
        self.made.append(made)
        self._do(self.lifecycle.call(made, call, mode))
        return made

    def report(self, event: Event) -> None:
        """Reports an event."""
        self._do(self.lifecycle.report(event))

    def go_on(self) -> None:
        """Reports what is awaited, if anything is."""
        event = AWAITED.get(self.lifecycle.phase)
        if event is not None:
            self.report(event)

    def settle(self) -> Phase:
        """Reports everything that is awaited; gives the phase where it ends."""
        for _ in range(4 * len(self.made) + 4):
            self.go_on()
        return self.lifecycle.phase

    def answers(self) -> list[str | None]:
        """Gives what each call got, in the order of the calls."""
        return [made.answer for made in self.made]

    def _do(self, steps: list[Step[Made]]) -> None:
        entered: Phase | None = None
        for step in steps:
            match step:
                case Enter(phase, mode):
                    assert (mode is not None) == (phase is Phase.PAUSING)
                    entered = phase
                case AbortRequests():
                    assert (entered or self.lifecycle.phase) in (Phase.PAUSED, Phase.SUSPENDED)
                    self.num_aborts += 1
                case Reply(made):
                    assert made.answer is None, f"{made} is answered twice"
                    assert made.mode is not PauseMode.ABORT or self.num_aborts > made.num_aborts_before
                    made.answer = "done"
                case Fail(made, error):
                    assert made.answer is None, f"{made} is answered twice"
                    made.answer = type(error).__name__
        assert entered in (None, self.lifecycle.phase), "the last phase entered is not the phase"
        self.steps += steps


def one_at_a_time(calls: list[Call]) -> tuple[list[str], Phase]:
    """Gives what calls get when each waits for the one before it, and where the engine is then."""
    phase = Phase.RUNNING
    answers: list[str] = []
    for call in calls:
        answer = "done"
        if phase is Phase.STOPPED and call is not Call.SHUTDOWN:
            answer = "EngineStoppedError"
        elif call is Call.UNPAUSE and phase is Phase.SUSPENDED:
            answer = "LifecycleError"
        elif call is Call.PAUSE and phase is Phase.RUNNING:
            phase = Phase.PAUSED
        elif call is Call.UNPAUSE:
            phase = Phase.RUNNING
        elif call is Call.SUSPEND:
            phase = Phase.SUSPENDED
        elif call is Call.RESUME and phase is Phase.SUSPENDED:
            phase = Phase.PAUSED
        elif call is Call.SHUTDOWN:
            phase = Phase.STOPPED
        answers.append(answer)
    return answers, phase


USER_CALLS = st.sampled_from([Call.PAUSE, Call.UNPAUSE, Call.SUSPEND, Call.RESUME])
CALLS = st.tuples(USER_CALLS, st.sampled_from(PauseMode))
MOVES = st.lists(CALLS | st.none(), max_size=30)
"""Calls, with their modes where they pause, and None where the awaited event comes."""


def make(engine: Engine, moves: list[tuple[Call, PauseMode] | None]) -> None:
    """Makes the moves."""
    for move in moves:
        if move is None:
            engine.go_on()
        else:
            call, mode = move
            engine.call(call, mode if call is Call.PAUSE else PauseMode.KEEP)


@given(MOVES)
def test_calls_at_once_get_what_they_get_one_at_a_time(moves: list[tuple[Call, PauseMode] | None]) -> None:
    """Callers race; however their calls fall between the engine's events, the outcome is the same."""
    engine = Engine()
    make(engine, moves)
    end = engine.settle()
    answers, phase = one_at_a_time([made.call for made in engine.made])
    assert engine.answers() == answers
    assert end is phase
    if not any(made.mode is PauseMode.ABORT for made in engine.made):
        assert engine.num_aborts == 0


@given(MOVES, MOVES)
def test_a_shutdown_ends_everything_from_anywhere(
    before: list[tuple[Call, PauseMode] | None], after: list[tuple[Call, PauseMode] | None]
) -> None:
    """It waits for nobody, and nobody waits for ever because of it."""
    engine = Engine()
    make(engine, before)
    waiting = [made for made in engine.made if made.answer is None]
    shutdown = engine.call(Call.SHUTDOWN)
    assert {made.answer for made in waiting} <= {"EngineStoppedError"}
    assert shutdown.answer is None
    num_before = len(engine.made)
    make(engine, after)
    engine.call(Call.SHUTDOWN)
    assert engine.settle() is Phase.STOPPED
    assert shutdown.answer == "done"
    assert {made.answer for made in engine.made[num_before:-1]} <= {"EngineStoppedError"}
    assert engine.made[-1].answer == "done"


@given(MOVES, st.booleans(), MOVES)
def test_a_failure_is_final_and_ends_every_call(
    before: list[tuple[Call, PauseMode] | None],
    is_stopping: bool,  # noqa: FBT001 - Hypothesis gives it
    after: list[tuple[Call, PauseMode] | None],
) -> None:
    """No call may wait for an engine that is dead; to shut it down is no error."""
    engine = Engine()
    make(engine, before)
    if is_stopping:
        engine.call(Call.SHUTDOWN)
    waiting = [made for made in engine.made if made.answer is None]
    engine.report(Event.FAILED)
    for made in waiting:
        assert made.answer == ("done" if made.call is Call.SHUTDOWN else "EngineDeadError")
    num_before = len(engine.made)
    for event in Event:
        engine.report(event)
    make(engine, after)
    assert {made.answer for made in engine.made[num_before:]} <= {"EngineDeadError"}
    assert engine.call(Call.SHUTDOWN).answer == "done"
    assert engine.settle() is Phase.FAILED


@given(MOVES)
def test_a_cancel_from_outside_stops_the_engine(moves: list[tuple[Call, PauseMode] | None]) -> None:
    """The actors live in the caller's task group; when that is cancelled nobody calls shutdown."""
    engine = Engine()
    make(engine, moves)
    waiting = [made for made in engine.made if made.answer is None]
    engine.report(Event.ACTORS_STOPPED)
    assert {made.answer for made in waiting} <= {"EngineStoppedError"}
    assert engine.lifecycle.phase is Phase.STOPPED
