"""Tasks for a supervisor: one that writes its life down, one that counts, one that asks without end."""

from typing import ClassVar

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.kit.actor import Actor, Address
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import Ask


class Child:
    """A task that writes its life down, and takes some turns of the loop for each part of it."""

    def __init__(self, name: str, log: list[str], *, num_turns: int = 2) -> None:
        self.name = name
        self.log = log
        self.num_turns = num_turns
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.error: Exception | None = None
        """What `fail` made it break of."""
        self._has_to_fail = anyio.Event()

    def fail(self, error: Exception) -> None:
        """Makes it break."""
        self.error = error
        self._has_to_fail.set()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Lives until cancelled."""
        try:
            await turns(self.num_turns)
            if self.start_error is not None:
                raise self.start_error
            self.log.append(f"{self.name} ready")
            task_status.started()
            await self._has_to_fail.wait()
            assert self.error is not None
            raise self.error
        finally:
            with anyio.CancelScope(shield=True):
                await turns(self.num_turns)
            self.log.append(f"{self.name} ended")
            if self.stop_error is not None:
                raise self.stop_error


class Count(Ask[int], frozen=True):
    """Answer with how often this was asked."""


class Counter(Actor[Count]):
    """Counts."""

    name: ClassVar[str] = "counter"
    capacity: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self.max = 1_000_000

    async def handle(self, message: Count) -> object:
        """See the message."""
        self.num += 1
        if self.num > self.max:
            raise ValueError("broken")
        return self.num


class Pump:
    """Asks another without end, as the engine's pump does."""

    def __init__(self, counter: Address[Count]) -> None:
        self.counter = counter

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Asks until cancelled."""
        task_status.started()
        while True:
            await self.counter.ask(Count())


async def turns(num_turns: int) -> None:
    """Lets the loop go round so many times."""
    for _ in range(num_turns):
        await anyio.lowlevel.checkpoint()


def three() -> tuple[list[str], list[Child]]:
    """Gives a log and three children that write to it."""
    log: list[str] = []
    return log, [Child(name, log) for name in ("a", "b", "c")]


async def start_all(supervisor: Supervisor, children: list[Child]) -> None:
    """Starts children in order."""
    for child in children:
        await supervisor.start(child.name, child.run)


STARTED = ["a ready", "b ready", "c ready"]
STOPPED = ["c ended", "b ended", "a ended"]
