"""The link to a single rank in this process: its worker's mailbox."""

from collections import deque

from megallm.core_async.kit.actor import Address
from megallm.core_async.kit.reply import Reply
from megallm.core_async.messages import (
    CollectStep,
    Ints,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    StepPlan,
    StepResult,
    WorkerMessage,
)


class LocalLink:
    """A `Link` to one worker of this process."""

    def __init__(self, worker: Address[WorkerMessage], *, collects_at_once: bool) -> None:
        """`collects_at_once`: launching a step runs it, so its result is asked for together with it.

        Else the result is asked for when it is wanted: waiting for it would keep the worker from
        launching the step that follows.
        """
        self._worker = worker
        self._collects_at_once = collects_at_once
        self._coming: deque[Reply[StepResult] | None] = deque()

    @property
    def in_flight(self) -> int:
        """See Link."""
        return len(self._coming)

    async def launch(self, plan: StepPlan) -> None:
        """See Link; the mailbox takes the plan at once."""
        self._worker.tell(LaunchStep(plan))
        self._coming.append(self._worker.send(CollectStep()) if self._collects_at_once else None)

    async def collect(self) -> StepResult:
        """See Link."""
        reply = self._coming[0] or self._worker.send(CollectStep())
        result = await reply.wait()
        self._coming.popleft()
        return result

    async def release_cache(self, kept: Ints) -> None:
        """See Link."""
        await self._worker.ask(ReleaseCache(kept))

    async def restore_cache(self) -> None:
        """See Link."""
        await self._worker.ask(RestoreCache())
