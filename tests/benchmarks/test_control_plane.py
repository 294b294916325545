"""The control plane's suite: the real engine at a steady batch, and the messages that a step may cost."""

import anyio
import pytest

from benchmarks.control_plane import LOOPS, Schedule, decode, measure, schedule_of
from benchmarks.free_engine import FreeRunner, FreeStep, counted_messages
from megallm.core_async.errors import EngineDeadError
from megallm.core_async.kit.actor import MailboxAddress
from megallm.core_async.kit.thread_actor import ThreadAddress
from megallm.core_async.messages import StepPlan

SHORT = Schedule(num_warmup=5, window=5, num_windows=3)
MOST_MESSAGES = 8


class RecordingRunner(FreeRunner):
    """Keeps each step's numbers of rows: all, decoding, and sampling."""

    def __init__(self, max_requests: int) -> None:
        super().__init__(max_requests)
        self.rows: list[tuple[int, int, int]] = []

    def launch(self, plan: StepPlan) -> FreeStep:
        self.rows.append((len(plan.rows) // 4, plan.num_decode, plan.samples.count(1)))
        return super().launch(plan)


class BrokenRunner(FreeRunner):
    """Fails in its third step."""

    def launch(self, plan: StepPlan) -> FreeStep:
        if plan.step == 3:
            raise RuntimeError("the device is gone")
        return super().launch(plan)


@pytest.mark.parametrize("loop", list(LOOPS))
def test_a_step_costs_no_more_messages_for_a_larger_batch(loop: str) -> None:
    """One message a request would cost milliseconds a step; the whole control plane gets 8."""
    rows = [measure(loop, batch, SHORT, 4) for batch in (1, 48)]
    assert [row["loop"] for row in rows] == [loop, loop]
    assert [row["batch"] for row in rows] == [1, 48]
    for row in rows:
        messages = row["messages_per_step"]
        assert isinstance(messages, float)
        assert 4 <= messages <= MOST_MESSAGES
        for column in ("us_per_step", "best_us_per_step", "cpu_us_per_step"):
            microseconds = row[column]
            assert isinstance(microseconds, float)
            assert microseconds > 0


@pytest.mark.parametrize("loop", list(LOOPS))
def test_every_step_after_the_first_decodes_the_whole_batch(loop: str) -> None:
    """A figure for batch 9 that was taken while 7 decoded would be a figure for batch 7."""
    backend, options = LOOPS[loop]
    runner = RecordingRunner(9)
    marks = anyio.run(decode, runner, 9, SHORT, 4, lambda: 0, backend=backend, backend_options=options)
    measured = runner.rows[: 1 + SHORT.num_warmup + SHORT.window * SHORT.num_windows]
    assert measured == [(9, 0, 9)] + [(9, 9, 9)] * (len(measured) - 1)
    assert len(marks) == SHORT.num_windows + 1
    assert all(marks[place].wall_s < marks[place + 1].wall_s for place in range(SHORT.num_windows))


@pytest.mark.parametrize("loop", list(LOOPS))
def test_an_engine_that_dies_ends_the_run(loop: str) -> None:
    """A benchmark that hangs is worse than one that fails."""
    backend, options = LOOPS[loop]
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDeadError, match="the device is gone")):
        anyio.run(decode, BrokenRunner(2), 2, SHORT, 4, lambda: 0, backend=backend, backend_options=options)


def test_counting_leaves_nothing_behind() -> None:
    """A counter left in place would slow every later run in the process."""
    kinds = (MailboxAddress, ThreadAddress)
    before = [vars(kind).copy() for kind in kinds]
    with counted_messages() as num_messages:
        assert [vars(kind).copy() for kind in kinds] != before
    assert [vars(kind).copy() for kind in kinds] == before
    assert num_messages() == 0


def test_a_schedule_holds_the_steps_that_were_asked_for() -> None:
    """Windows short enough for a median, a warm-up in front, and no step less than asked."""
    assert schedule_of(1000) == Schedule(num_warmup=100, window=50, num_windows=20)
    assert schedule_of(7) == Schedule(num_warmup=10, window=7, num_windows=1)
    with pytest.raises(ValueError, match="steps is 0"):
        schedule_of(0)
