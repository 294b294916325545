"""Calls that the program of every rank makes: which ranks have made the next one, and which are over."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.kit.reply import Reply
from megallm.core_async.ranks.watch import Awaited
from megallm.core_async.transport.frames import error_of
from megallm.core_async.transport.rank_frames import CallEnded, CallMade

SHUTDOWN = "shutdown()"
"""The call after which a rank makes no other."""


class Together(Protocol):
    """Ranks that this one leads or gives work, whose programs make the calls that its own makes."""

    @property
    def calls(self) -> "Gathering": ...

    def to_all(self, frame: Struct) -> None:
        """Tells every one of them; does nothing once they have gone."""
        ...


class Gathering:
    """The leader's books of the other ranks' calls. Calls pair by their number: each rank counts its own."""

    def __init__(self, names: Sequence[int]) -> None:
        """`names`: the global ranks of the others."""
        self._names = names
        self._made: dict[int, dict[int, str]] = {}
        """By the call's number: who has made it, and its name."""
        self._leaving: set[int] = set()
        self._waiting: dict[int, Reply[None]] = {}
        """The calls that this rank has made, by number."""
        self._next = 0

    def note(self, name: int, number: int, call: str) -> None:
        """Notes that a rank has made a call, which may be over already: this rank gave it up."""
        if call == SHUTDOWN:
            self._leaving.add(name)
        if number >= self._next or number in self._waiting:
            self._made.setdefault(number, {})[name] = call
        self._look()

    def lose(self, name: int) -> None:
        """Waits no more for a rank, which is gone."""
        self._names = [each for each in self._names if each != name]
        self._leaving.discard(name)
        for made in self._made.values():
            made.pop(name, None)
        self._look()

    def fail(self, make_error: Callable[[], ActorGone]) -> None:
        """Ends whoever waits."""
        for reply in self._waiting.values():
            reply.fail(make_error())

    def next_number(self) -> int:
        """Gives the number of this rank's next call, which is to be `gathered` or given up."""
        number, self._next = self._next, self._next + 1
        self._waiting[number] = Reply[None]()
        return number

    def give_up(self, number: int) -> None:
        """Waits no more for a call; idempotent."""
        self._waiting.pop(number, None)
        self._made.pop(number, None)

    async def gathered(self, number: int, call: str) -> None:
        """Waits until every rank has made the call of that number.

        Raises: LifecycleError where another rank made another call; ActorGone.
        """
        try:
            self._look()
            await self._waiting[number].wait()
            made = self._made.get(number, {})
        finally:
            self.give_up(number)
        others = {**dict.fromkeys(self._leaving, SHUTDOWN), **made}
        for name, other in sorted(others.items()):
            if other != call:
                raise LifecycleError(
                    f"rank {name} called {other} where this rank called {call}: with several ranks every"
                    " rank's program makes the same calls, in the same order"
                )

    def _look(self) -> None:
        for number, reply in self._waiting.items():
            if set(self._names) <= self._made.get(number, {}).keys() | self._leaving:
                reply.set(None)


class MadeCalls:
    """The books of a rank that does not lead: which of its own calls wait until they are over."""

    def __init__(self, say: Callable[[Struct], object]) -> None:
        """`say` tells the rank that leads."""
        self._say = say
        self.awaited = Awaited()
        """The calls that wait: the leader is watched meanwhile."""
        self._next = 0
        self._waiting: dict[int, Reply[None]] = {}
        self._early: dict[int, CallEnded] = {}
        """Of calls that the leader has given up before this rank made them."""

    def made(self, call: str) -> Reply[None]:
        """Tells that this rank's program makes a call; the reply comes when it is over everywhere."""
        number, self._next = self._next, self._next + 1
        reply = self._waiting[number] = Reply[None]()
        self.awaited.set(len(self._waiting))
        self._say(CallMade(number, call))
        early = self._early.pop(number, None)
        if early is not None:
            self.end(early)
        return reply

    def end(self, ended: CallEnded) -> None:
        """Notes that a call is over."""
        if ended.number >= self._next:
            self._early[ended.number] = ended
            return
        reply = self._waiting.pop(ended.number, None)
        if reply is None:
            return  # it has failed here meanwhile
        self.awaited.set(len(self._waiting))
        if ended.fault is None:
            reply.set(None)
        else:
            reply.fail(error_of(ended.fault))

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Ends whoever waits."""
        while self._waiting:
            self._waiting.popitem()[1].fail(make_error())
