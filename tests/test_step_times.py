"""Where the time of a step goes: each part adds up on its own."""

from megallm.core_async.messages import EngineStats, StepResult, StepSplit, pack_ints
from megallm.core_async.step_times import StepTimes


def test_new_times_are_zero() -> None:
    """A benchmark takes differences from here."""
    times = StepTimes()
    assert (times.num_steps, times.plan_s, times.post_s) == (0, 0.0, 0.0)
    assert (times.prepare_s, times.forward_s, times.sample_s) == (0.0, 0.0, 0.0)


def test_each_part_is_summed_on_its_own() -> None:
    """A step's plan, forward pass and text overlap those of others, so they are never one number."""
    times = StepTimes()
    for number in (1, 2):
        times.add_plan(0.5)
        times.add_result(
            StepResult(number, pack_ints([]), prepare_s=1.0, forward_s=2.0 * number, sample_s=4.0)
        )
    times.add_post(0.25)
    heard: list[int] = []
    times.on_result = lambda result: heard.append(result.step)
    times.add_result(StepResult(3, pack_ints([])))
    assert (times.num_steps, heard) == (3, [3])
    assert (times.plan_s, times.post_s) == (1.0, 0.25)
    assert (times.prepare_s, times.forward_s, times.sample_s) == (2.0, 6.0, 8.0)


def test_stats_carry_the_last_steps_parts_beside_the_sums() -> None:
    """Whoever watches the engine sees what a step costs now, not only since the start."""
    times = StepTimes()
    assert times.stamped(EngineStats(running=3)) == EngineStats(running=3)
    for number in (1, 2):
        times.add_plan(float(number))
        times.add_result(
            StepResult(
                number, pack_ints([]), prepare_s=0.5, forward_s=number, sample_s=0.25, is_captured=number == 2
            )
        )
        times.add_post(0.125 * number)
    stats = times.stamped(EngineStats(running=3))
    assert stats.running == 3
    assert stats.last_step == StepSplit(2.0, 0.5, 2.0, 0.25, 0.25)
    assert stats.all_steps == StepSplit(3.0, 1.0, 3.0, 0.5, 0.375)
    assert stats.captured_steps == 1
