"""Small actors that do what a message says: answer, refuse, break, never end, or ask another."""

from typing import ClassVar

import anyio

from megallm.core_async.kit.actor import Actor, Address, Refusal
from megallm.core_async.messages import Ask


class BusyError(Exception):
    """What a refused asker gets."""


class Double(Ask[int], frozen=True):
    """Answer with twice the value, after so many turns of the loop."""

    value: int
    num_turns: int = 0


class Refuse(Ask[int], frozen=True):
    """Answer with an error."""


class Crash(Ask[int], frozen=True):
    """Break, after so many turns of the loop."""

    num_turns: int = 0


class Forever(Ask[int], frozen=True):
    """Never answer."""


type Message = Double | Refuse | Crash | Forever


class Worker(Actor[Message]):
    """Does what it is told and keeps a list of it."""

    name: ClassVar[str] = "worker"
    capacity: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[Message] = []

    async def handle(self, message: Message) -> object:
        """See the messages."""
        match message:
            case Double(value, num_turns):
                await turns(num_turns)
                self.handled.append(message)
                return 2 * value
            case Refuse():
                raise Refusal(BusyError("busy"))
            case Crash(num_turns):
                await turns(num_turns)
                raise ValueError("broken")
            case Forever():
                return await anyio.sleep_forever()


class Asker(Actor[Double]):
    """Asks another actor in order to answer."""

    name: ClassVar[str] = "asker"
    capacity: ClassVar[int] = 4

    def __init__(self, worker: Address[Message], message: Ask[int]) -> None:
        super().__init__()
        self.worker = worker
        self.message = message

    async def handle(self, message: Double) -> object:
        """Passes the question on."""
        return await self.worker.ask(self.message)


async def turns(num_turns: int) -> None:
    """Lets the loop go round so many times."""
    for _ in range(num_turns):
        await anyio.lowlevel.checkpoint()
