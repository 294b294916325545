"""The lifecycle by examples: one for each sentence of its promise."""

from collections.abc import Iterator

import pytest

from megallm.core_async.errors import LifecycleError
from megallm.core_async.plan.phases import (
    AbortRequests,
    Call,
    Enter,
    Event,
    Fail,
    PauseMode,
    Phase,
    Reply,
)
from tests.plan.test_phases import Engine, Made


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
