"""Asks in tasks of their own, and what became of each."""

from typing import Any

import anyio
from anyio.abc import TaskGroup

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.actor import Address
from megallm.core_async.messages import Ask
from tests.checkpoints import AtAwait


class Outcomes:
    """What a number of asks gave: a value each, or that nobody is there to answer."""

    def __init__(self) -> None:
        self.values: list[Any] = []  # Any: whatever the messages promise
        self.errors: list[ActorGone] = []

    async def ask(self, tasks: TaskGroup, address: Address[Any], message: Ask[Any]) -> None:  # Any: as above
        """Begins an ask, and returns when the message is in the mailbox, or nobody is there."""
        is_put = anyio.Event()
        tasks.start_soon(self._ask, address, message, is_put)
        await is_put.wait()

    async def _ask(
        self, address: Address[Any], message: Ask[Any], is_put: anyio.Event
    ) -> None:  # Any: as above
        try:
            self.values.append(await AtAwait(1, address.ask(message), is_put.set))
        except ActorGone as gone:
            self.errors.append(gone)
            is_put.set()
