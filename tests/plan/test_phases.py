"""The lifecycle table, pair by pair, and its calls against a model that takes them one at a time."""

from collections.abc import Iterator

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


# ---- examples ------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Engine]:
    """Gives an engine that runs; at the end no call of it may be without an answer."""
    engine = Engine()
    engine.report(Event.STARTED)
    engine.steps.clear()
    yield engine
    engine.settle()
    assert None not in engine.answers()


def test_a_pause_is_answered_when_it_is_reached(running: Engine) -> None:
    """Whoever changes weights after `await pause()` needs that no step is in flight."""
    pause = running.call(Call.PAUSE, PauseMode.WAIT)
    assert running.steps == [Enter(Phase.PAUSING, PauseMode.WAIT)]
    assert pause.answer is None
    running.report(Event.DRAINED)
    assert running.steps[1:] == [Enter(Phase.PAUSED), Reply(pause)]


def test_suspend_pauses_first(running: Engine) -> None:
    """Upstream drops a suspend of a running engine, and the caller hangs."""
    suspend = running.call(Call.SUSPEND)
    running.report(Event.DRAINED)
    assert suspend.answer is None
    running.report(Event.CACHE_RELEASED)
    assert running.steps == [
        Enter(Phase.PAUSING, PauseMode.KEEP),
        Enter(Phase.PAUSED),
        Enter(Phase.SUSPENDING),
        Enter(Phase.SUSPENDED),
        Reply(suspend),
    ]


def test_unpause_of_a_suspended_engine_names_the_way_out(running: Engine) -> None:
    """Upstream ignores it, and the caller hangs."""
    running.call(Call.SUSPEND)
    running.settle()
    running.steps.clear()
    running.call(Call.UNPAUSE)
    (step,) = running.steps
    assert isinstance(step, Fail)
    assert isinstance(step.error, LifecycleError)
    assert str(step.error) == (
        "unpause() can't run while the engine is suspended; call resume() first "
        "(legal: pause(), suspend(), resume(), shutdown())"
    )


def test_resume_lands_in_paused(running: Engine) -> None:
    """Upstream's rule, which scripts rely on: weights may still change before unpause()."""
    running.call(Call.SUSPEND)
    running.settle()
    running.call(Call.RESUME)
    assert running.settle() is Phase.PAUSED
    running.call(Call.UNPAUSE)
    assert running.settle() is Phase.RUNNING


def test_a_call_while_starting_waits_for_the_start() -> None:
    """It is neither lost nor an error: the engine will run in a moment."""
    engine = Engine()
    pause = engine.call(Call.PAUSE)
    assert engine.steps == []
    engine.report(Event.STARTED)
    assert engine.steps == [Enter(Phase.RUNNING), Enter(Phase.PAUSING, PauseMode.KEEP)]
    engine.report(Event.DRAINED)
    assert pause.answer == "done"


def test_a_second_pause_joins_the_first(running: Engine) -> None:
    """A weaker or equal one changes nothing: who waits for requests to end is not cut short by a freeze."""
    first = running.call(Call.PAUSE, PauseMode.WAIT)
    second = running.call(Call.PAUSE, PauseMode.KEEP)
    assert running.steps == [Enter(Phase.PAUSING, PauseMode.WAIT)]
    running.report(Event.DRAINED)
    assert running.steps[1:] == [Enter(Phase.PAUSED), Reply(first), Reply(second)]


@pytest.mark.parametrize("first", [PauseMode.KEEP, PauseMode.WAIT])
def test_an_abort_takes_effect_on_a_pause_under_way(running: Engine, first: PauseMode) -> None:
    """Whoever waits for long requests can lose patience; no request is left for either caller."""
    one = running.call(Call.PAUSE, first)
    two = running.call(Call.PAUSE, PauseMode.ABORT)
    three = running.call(Call.PAUSE, PauseMode.ABORT)
    assert running.steps == [Enter(Phase.PAUSING, first), Enter(Phase.PAUSING, PauseMode.ABORT)]
    running.report(Event.DRAINED)
    assert running.steps[2:] == [Enter(Phase.PAUSED), AbortRequests(), Reply(one), Reply(two), Reply(three)]


def test_an_abort_ends_requests_that_are_frozen_already(running: Engine) -> None:
    """It returns at once like any pause of a paused engine, and still does what it says."""
    running.call(Call.PAUSE)
    running.settle()
    running.steps.clear()
    abort = running.call(Call.PAUSE, PauseMode.ABORT)
    assert running.steps == [AbortRequests(), Reply(abort)]


def test_an_abort_lasts_for_one_pause(running: Engine) -> None:
    """The next pause keeps its requests."""
    running.call(Call.PAUSE, PauseMode.ABORT)
    running.settle()
    running.call(Call.UNPAUSE)
    running.settle()
    assert running.num_aborts == 1
    running.call(Call.PAUSE)
    running.settle()
    running.call(Call.SUSPEND)
    running.call(Call.RESUME)
    running.settle()
    assert running.num_aborts == 1


def test_calls_take_effect_in_the_order_they_came(running: Engine) -> None:
    """A call does not overtake one that waits, though it could join what is under way."""
    running.call(Call.PAUSE)
    running.call(Call.UNPAUSE)
    last = running.call(Call.PAUSE)
    running.report(Event.DRAINED)
    assert last.answer is None
    running.report(Event.RESUMED_WORK)
    running.report(Event.DRAINED)
    assert last.answer == "done"
    assert running.lifecycle.phase is Phase.PAUSED


def test_events_that_come_after_a_shutdown_began_are_too_late(running: Engine) -> None:
    """The pump drains while the engine stops; that must not bring it back to paused."""
    running.call(Call.PAUSE)
    running.call(Call.SHUTDOWN)
    running.report(Event.DRAINED)
    assert running.lifecycle.phase is Phase.STOPPING


def test_only_a_pause_has_a_mode(running: Engine) -> None:
    """An unpause that aborts would be a slip of the owner's."""
    with pytest.raises(AssertionError, match="unpause has no mode abort"):
        running.lifecycle.call(Made(0, Call.UNPAUSE, PauseMode.ABORT), Call.UNPAUSE, PauseMode.ABORT)
