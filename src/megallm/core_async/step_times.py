"""Where the time of a step goes: the last step's seconds, and sums that a benchmark reads and divides."""

from collections.abc import Callable

from msgspec import structs

from megallm.core_async.messages import EngineStats, StepResult, StepSplit


class StepTimes:
    """Seconds spent since the start, by part of the step. Written in the engine's loop, read anywhere.

    `plan_s`: the scheduler's answers. `prepare_s`, `forward_s`, `sample_s`: on the rank's thread.
    `post_s`: the detokeniser. Plan and post overlap the forward pass of another step.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_captured = 0
        """Steps that were replayed from a captured graph."""
        self.plan_s = 0.0
        self.prepare_s = 0.0
        self.forward_s = 0.0
        self.sample_s = 0.0
        self.post_s = 0.0
        self.on_result: Callable[[StepResult], None] | None = None
        """Who else hears of each result; called in the engine's loop, so it is quick and never raises."""
        self._last_plan_s = 0.0
        self._last_post_s = 0.0
        self._last: StepResult | None = None

    def add_plan(self, seconds: float) -> None:
        """Adds one answer of the scheduler."""
        self._last_plan_s = seconds
        self.plan_s += seconds

    def add_result(self, result: StepResult) -> None:
        """Adds what the rank's thread spent on one step."""
        self._last = result
        self.num_steps += 1
        self.num_captured += result.is_captured
        self.prepare_s += result.prepare_s
        self.forward_s += result.forward_s
        self.sample_s += result.sample_s
        if self.on_result is not None:
            self.on_result(result)

    def add_post(self, seconds: float) -> None:
        """Adds one batch of the detokeniser."""
        self._last_post_s = seconds
        self.post_s += seconds

    def stamped(self, stats: EngineStats) -> EngineStats:
        """Gives the scheduler's figures with the times of now."""
        last = self._last
        return structs.replace(
            stats,
            captured_steps=self.num_captured,
            last_step=StepSplit(
                self._last_plan_s,
                0.0 if last is None else last.prepare_s,
                0.0 if last is None else last.forward_s,
                0.0 if last is None else last.sample_s,
                self._last_post_s,
            ),
            all_steps=StepSplit(self.plan_s, self.prepare_s, self.forward_s, self.sample_s, self.post_s),
        )
