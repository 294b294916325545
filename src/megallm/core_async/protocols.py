"""The seams: what the engine needs of a runner, a link and a tokenizer, and nothing more.

Tests put fakes here. Knows messages; knows no implementation.
"""

from collections.abc import Sequence
from typing import Protocol

from megallm.core_async.messages import Ints, StepPlan, StepResult


class PendingStep(Protocol):
    """A step whose work is queued on the device."""

    def result(self) -> StepResult:
        """Waits, on the rank's thread, until the step has run; raises what it raised."""
        ...


class Runner(Protocol):
    """One rank's device: owns the model while bound, the cache, and the rows' state.

    Every method is called on the rank's one thread, in order.
    """

    @property
    def runs_at_launch(self) -> bool:
        """Whether a step has run when `launch` returns; else its work is only queued by then."""
        ...

    def start(self) -> None:
        """Binds the model and allocates the cache.

        Raises: UnsupportedModelError, and what torch raises when memory is short.
        """
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queues one step; returns before it has run where the device allows."""
        ...

    def release_cache(self, kept: Ints) -> None:
        """Gives the cache's device memory back; what the `kept` blocks hold survives in host memory.

        What the others hold is lost.
        """
        ...

    def restore_cache(self) -> None:
        """Takes the cache's device memory again, with the contents of the blocks that were kept."""
        ...

    def close(self) -> None:
        """Gives the user's model back as it was and frees the cache; may be called twice."""
        ...


class Tokenizer(Protocol):
    """The part of megatron's tokenizer interface that the engine uses."""

    @property
    def vocab_size(self) -> int: ...

    def tokenize(self, text: str) -> list[int]:
        """Gives the ids of a text; raises InvalidRequestError for one that has none."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Gives the text of ids; raises RequestFailedError where it can't, which fails that request alone."""
        ...


class Link(Protocol):
    """The ranks of one engine, seen from its pump: plans in, results out, in order."""

    @property
    def in_flight(self) -> int:
        """Plans launched whose results were not collected."""
        ...

    async def launch(self, plan: StepPlan) -> None:
        """Queues the plan on every rank."""
        ...

    async def collect(self) -> StepResult:
        """Waits for the oldest plan in flight."""
        ...

    async def release_cache(self, kept: Ints) -> None:
        """Makes every rank give its cache's device memory back, the `kept` blocks' contents to host memory.

        No plan may be in flight.
        """
        ...

    async def restore_cache(self) -> None:
        """Makes every rank take its cache's device memory again."""
        ...
