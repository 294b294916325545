"""Steps that several engines take together, whether each has work or not. Pure.

The experts of one model may be spread over engines that run different requests: in each step their ranks
exchange tokens, so step n of one is step n of all. Who begins a step that nobody has begun says so, and the
others follow, with an empty step where they have nothing to do: each ends where the furthest is.
"""

from collections.abc import Callable

from megallm.core_async.messages import StepPlan, StepResult

EMPTY = StepPlan.empty()


def is_empty(result: StepResult) -> bool:
    """Whether a result is that of an empty step, which no scheduler has planned."""
    return result.step == EMPTY.step


class Lockstep:
    """One engine's count of the steps it has begun, beside the most that any has."""

    def __init__(self, announce: Callable[[int], object]) -> None:
        """`announce` tells the other engines that a step of that number has begun; it never waits."""
        self._announce = announce
        self.num_begun = 0
        """Steps that this engine has begun, empty ones among them."""
        self._most_begun = 0

    @property
    def is_behind(self) -> bool:
        """Whether another engine waits in a step that this one has not begun."""
        return self.num_begun < self._most_begun

    def taken(self, plan: StepPlan | None) -> StepPlan | None:
        """Gives what this engine runs next, and counts it as begun; its work is to be queued at once.

        That is its own plan; without one the empty plan where it is behind, else nothing.
        """
        if plan is None and not self.is_behind:
            return None
        self._begin()
        return EMPTY if plan is None else plan

    def follow(self, number: int) -> None:
        """Notes that another engine has begun the step of that number; news may come late and twice."""
        self._most_begun = max(self._most_begun, number)

    def _begin(self) -> None:
        self.num_begun += 1
        if self.num_begun > self._most_begun:
            self._most_begun = self.num_begun
            self._announce(self.num_begun)
