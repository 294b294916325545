"""Where the time of a step goes: sums that a benchmark reads and divides."""

from megallm.core_async.messages import StepResult


class StepTimes:
    """Seconds spent since the start, by part of the step. Written in the engine's loop, read anywhere.

    `plan_s`: the scheduler's answers. `prepare_s`, `forward_s`, `sample_s`: on the rank's thread.
    `post_s`: the detokeniser. Plan and post overlap the forward pass of another step.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.plan_s = 0.0
        self.prepare_s = 0.0
        self.forward_s = 0.0
        self.sample_s = 0.0
        self.post_s = 0.0

    def add_plan(self, seconds: float) -> None:
        """Adds one answer of the scheduler."""
        self.plan_s += seconds

    def add_result(self, result: StepResult) -> None:
        """Adds what the rank's thread spent on one step."""
        self.num_steps += 1
        self.prepare_s += result.prepare_s
        self.forward_s += result.forward_s
        self.sample_s += result.sample_s

    def add_post(self, seconds: float) -> None:
        """Adds one batch of the detokeniser."""
        self.post_s += seconds
