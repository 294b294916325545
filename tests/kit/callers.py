"""An actor with a thread that calls what it is given, and calls to give it."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import anyio

from megallm.core_async.kit.thread_actor import ThreadActor
from megallm.core_async.messages import Ask


class Call(Ask[Any], frozen=True):  # Any: whatever the function gives
    """Call a function on the actor's thread and answer with what it gives."""

    function: Callable[[], object]


def boom() -> None:
    """Breaks."""
    raise ValueError("broken")


def leave() -> None:
    """Does what ends a whole program elsewhere."""
    raise SystemExit(3)


def nothing() -> None:
    """Does nothing."""


class Caller(ThreadActor[Call]):
    """Calls functions on its thread."""

    name: ClassVar[str] = "caller"
    capacity: ClassVar[int] = 4

    def __init__(self, start: Callable[[], object] = nothing, stop: Callable[[], object] = nothing) -> None:
        super().__init__()
        self.start = start
        self.stop = stop
        self.events: list[str] = []
        self.threads: set[str] = set()

    def note(self, event: str) -> None:
        """Writes down what happens, and on which thread."""
        self.events.append(event)
        self.threads.add(threading.current_thread().name)

    def on_start(self) -> None:
        """Calls `start`."""
        self.note("start")
        self.start()

    def handle(self, message: Call) -> object:
        """Makes the call."""
        self.note("handle")
        return message.function()

    def on_stop(self) -> None:
        """Calls `stop`."""
        self.note("stop")
        self.stop()


class Hold:
    """A call that takes until it is released; a test knows when it is under way."""

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._is_released = threading.Event()

    def __call__(self) -> str:
        self._has_begun.set()
        assert self._is_released.wait(10), "never released"
        return "held"

    async def begun(self) -> None:
        """Waits until the call is under way."""
        await anyio.to_thread.run_sync(self._has_begun.wait)

    def release(self) -> None:
        """Lets the call end."""
        self._is_released.set()


def threads_of(actor: Caller) -> list[str]:
    """Gives the actor's threads that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name == f"megallm-{actor.name}"]
