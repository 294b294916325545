"""A detokeniser that others hear with."""

from collections.abc import Awaitable, Callable, Sequence

from megallm.core_async.actors.detokenizer import Detokenizer, Parcel
from megallm.core_async.kit.outbox import Outboxes
from megallm.core_async.messages import TokenBatch
from megallm.core_async.step_times import StepTimes
from megallm.core_async.transport.routes import Routes


class SharedDetokenizer(Detokenizer):
    """The detokeniser where a step's output concerns more than this engine's readers."""

    def __init__(
        self,
        detokenize: Callable[[Sequence[int]], str],
        outboxes: Outboxes[Parcel],
        times: StepTimes,
        routes: Routes,
        *,
        on_batch: Callable[[TokenBatch], Awaitable[None]],
    ) -> None:
        """`on_batch` hears of each batch before its text is made."""
        super().__init__(detokenize, outboxes, times, routes)
        self._on_batch = on_batch

    async def handle(self, message: TokenBatch) -> None:
        """See Detokenizer."""
        await self._on_batch(message)
        await super().handle(message)
