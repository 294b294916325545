"""Waiting for what other ranks take part in: a rank that does not answer meanwhile is lost.

A step has no length that is too long, but a rank whose loop answers is there. So after some seconds the
others are asked, and only who does not answer is given up; and at a deadline, everybody.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.errors import RankLostError
from megallm.core_async.transport.rank_frames import AskWhere

PATIENCE_S: Final = 2.0
"""How long a wait may be before the other ranks are asked whether they are there, each time."""

ANSWER_S: Final = 3.0
"""How long they have to answer."""

STEP_S: Final = 600.0
"""How long a step may take: a thread may hang while its rank's loop answers."""

CALL_PATIENCE_S: Final = 10.0
CALL_ANSWER_S: Final = 600.0
"""The same where a program waits for another's call: that one's loop may be the program's own, and busy."""


class Peer(Protocol):
    """Another rank."""

    @property
    def name(self) -> int: ...

    def put(self, frame: Struct) -> None: ...


class Watch:
    """Asks ranks whether they are there. Used by one task; `answered` is called by whoever reads."""

    def __init__(
        self,
        peers: Sequence[Peer],
        own_name: int,
        *,
        patience_s: float = PATIENCE_S,
        answer_s: float = ANSWER_S,
        step_s: float = STEP_S,
    ) -> None:
        """Seconds: before peers are asked, that they have to answer, and of the longest wait of all."""
        self._peers = peers
        self._own_name = own_name
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._step_s = step_s
        self._silent: set[int] = set()
        self._num_steps: dict[int, int] = {}
        """What each rank said last: how many steps it has run."""
        self._all_answered = anyio.Event()

    def answered(self, name: int, num_steps: int) -> None:
        """Notes a rank's answer."""
        self._num_steps[name] = num_steps
        self._silent.discard(name)
        if not self._silent:
            self._all_answered.set()

    async def wait_for[T](self, wait: Callable[[], Awaitable[T]], num_steps: int) -> T:
        """Waits as `wait` does, which is called again after each time that it was cut short.

        `num_steps`: that this rank has run. Raises: what `wait` raises; RankLostError naming who is lost.
        """
        deadline = anyio.current_time() + self._step_s
        while True:
            with anyio.move_on_after(min(self._patience_s, self._step_s)):
                return await wait()
            await self._ask()
            if anyio.current_time() >= deadline:
                steps = {self._own_name: num_steps, **self._num_steps}
                last = min(steps.values())
                behind = sorted(name for name, done in steps.items() if done == last)
                raise RankLostError(
                    f"rank {behind[0]} hangs: step {last + 1} has not ended on ranks {behind}"
                    f" in {self._step_s:g} s"
                )

    async def _ask(self) -> None:
        self._silent = {peer.name for peer in self._peers}
        self._all_answered = anyio.Event()
        for peer in self._peers:
            peer.put(AskWhere())
        with anyio.move_on_after(self._answer_s):
            await self._all_answered.wait()
            return
        raise RankLostError(
            f"rank {min(self._silent)} is lost: it was asked whether it is there, and has not answered for"
            f" {self._answer_s:g} s"
        )


def watch_of_calls(peer: Peer, own_name: int) -> Watch:
    """Gives what watches the rank that leads while this one's program waits for a call to be over."""
    return Watch([peer], own_name, patience_s=CALL_PATIENCE_S, answer_s=CALL_ANSWER_S, step_s=math.inf)


class Awaited:
    """What is awaited of one peer, which is watched while that is anything."""

    def __init__(self) -> None:
        self._count = 0
        self._is_some = anyio.Event()
        self._is_none = anyio.Event()

    def set(self, count: int) -> None:
        """Notes how much is awaited now."""
        had, self._count = self._count, count
        if count and not had:
            self._is_some.set()
            self._is_none = anyio.Event()
        elif had and not count:
            self._is_none.set()
            self._is_some = anyio.Event()

    async def watch(self, watch: Watch, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Asks the peer whether it is there, now and then while something is awaited.

        Raises: RankLostError when it is not.
        """
        task_status.started()
        while True:
            await self._is_some.wait()
            await watch.wait_for(self._is_none.wait, 0)
