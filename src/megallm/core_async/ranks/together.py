"""Calls that the program of every rank makes: which ranks have made the next one."""

from collections.abc import Callable, Sequence

from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.kit.reply import Reply

SHUTDOWN = "shutdown"
"""The call after which a rank makes no other."""


class Gathering:
    """The leader's books of the other ranks' calls. Calls pair by their number: each rank counts its own."""

    def __init__(self, names: Sequence[int]) -> None:
        """`names`: the global ranks of the others."""
        self._names = names
        self._made: dict[int, dict[int, str]] = {}
        """By the call's number: who has made it, and its name."""
        self._leaving: set[int] = set()
        self._waiting: tuple[int, Reply[None]] | None = None
        self._next = 0

    def note(self, name: int, number: int, call: str) -> None:
        """Notes that a rank has made a call."""
        self._made.setdefault(number, {})[name] = call
        if call == SHUTDOWN:
            self._leaving.add(name)
        self._look()

    def fail(self, make_error: Callable[[], ActorGone]) -> None:
        """Ends whoever waits."""
        if self._waiting is not None:
            self._waiting[1].fail(make_error())

    def next_number(self) -> int:
        """Gives the number of this rank's next call."""
        number, self._next = self._next, self._next + 1
        return number

    async def gathered(self, number: int, call: str) -> None:
        """Waits until every rank has made the call of that number.

        Raises: LifecycleError where another rank made another call, and while one waits; ActorGone.
        """
        if self._waiting is not None:
            raise LifecycleError(f"{call}() was called while another call waits for the other ranks")
        reply = Reply[None]()
        self._waiting = number, reply
        try:
            self._look()
            await reply.wait()
        finally:
            self._waiting = None
            made = self._made.pop(number, {})
        others = {**dict.fromkeys(self._leaving, SHUTDOWN), **made}
        for name, other in sorted(others.items()):
            if other != call:
                raise LifecycleError(
                    f"rank {name} called {other}() where this rank called {call}(): with several ranks every"
                    " rank's program makes the same calls, in the same order"
                )

    def _look(self) -> None:
        if self._waiting is None:
            return
        number, reply = self._waiting
        if set(self._names) <= self._made.get(number, {}).keys() | self._leaving:
            reply.set(None)
