"""The link to a single rank in this process: its worker's mailbox."""

from megallm.core_async.kit.actor import Address
from megallm.core_async.messages import (
    CollectStep,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    StepPlan,
    StepResult,
    WorkerMessage,
)


class LocalLink:
    """A `Link` to one worker of this process."""

    def __init__(self, worker: Address[WorkerMessage]) -> None:
        self._worker = worker
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """See Link."""
        return self._in_flight

    async def launch(self, plan: StepPlan) -> None:
        """See Link; the mailbox takes the plan at once."""
        self._worker.tell(LaunchStep(plan))
        self._in_flight += 1

    async def collect(self) -> StepResult:
        """See Link."""
        result = await self._worker.ask(CollectStep())
        self._in_flight -= 1
        return result

    async def release_cache(self, *, keep_contents: bool) -> None:
        """See Link."""
        await self._worker.ask(ReleaseCache(keep_contents))

    async def restore_cache(self) -> None:
        """See Link."""
        await self._worker.ask(RestoreCache())
