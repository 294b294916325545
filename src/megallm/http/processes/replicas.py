"""The front ends of a server, as processes: started, replaced when they die, ended together."""

import logging
import socket
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.engine import Engine
from megallm.core_async.errors import MegaLLMError
from megallm.http.processes.hub import Peer
from megallm.http.processes.process import start_frontend

log = logging.getLogger(__name__)

KILL_S: Final = 1.8
"""A front end that is there so long after the time of its drain is killed."""
MAX_STARTS: Final = 3
"""Front ends in a row that may end before they have served; then there are to be none."""


class FrontendFailedError(MegaLLMError, RuntimeError):
    """The front ends' processes end as soon as they start. The installation's fault; stderr says why."""


class Replicas:
    """Owns the front ends of one listening socket, and that socket, which they share."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        num_replicas: int,
        setup: bytes,
        check_grammar: Callable[[str], None],
    ) -> None:
        """`setup` and `check_grammar`: see Peer."""
        self._engine = engine
        self._listener = listener
        self._num_replicas = num_replicas
        self._setup = setup
        self._check_grammar = check_grammar
        self._peers: set[Peer] = set()
        self.pids: set[int] = set()
        """Processes that run now."""
        self._num_ready = 0
        self._are_ready = anyio.Event()
        self._drain_asked = anyio.Event()
        self._grace = anyio.CancelScope()
        """Its deadline is when the last of them has to be gone."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keeps the front ends running until they have drained; ready once each answers the port.

        A cancel ends them within a second.
        Raises: FrontendFailedError.
        """
        try:
            async with anyio.create_task_group() as tasks:
                async with anyio.create_task_group() as keepers:
                    for _ in range(self._num_replicas):
                        keepers.start_soon(self._keep_one)
                    tasks.start_soon(self._end_late, keepers.cancel_scope)
                    await self._are_ready.wait()
                    task_status.started()
                tasks.cancel_scope.cancel()
        except ExceptionGroup as group:
            raise first_of(group) from None
        finally:
            self._listener.close()

    def begin_drain(self, timeout_s: float) -> None:
        """Has every front end drain; see AppServer. Those that are late are killed."""
        self._grace.deadline = min(self._grace.deadline, anyio.current_time() + timeout_s + KILL_S)
        self._drain_asked.set()
        self._are_ready.set()
        self._listener.close()
        for peer in self._peers:
            if peer.ready.is_set():
                peer.drain(timeout_s)
            else:
                peer.drop()

    async def _end_late(self, keepers: anyio.CancelScope) -> None:
        with self._grace:
            await anyio.sleep_forever()
        keepers.cancel()

    async def _keep_one(self) -> None:
        """Runs one front end after the other, until they are to end."""
        num_failed, has_served = 0, False
        while not self._drain_asked.is_set():
            peer, code = await self._run_one(counts=not has_served)
            has_served |= peer.ready.is_set()
            num_failed = 0 if peer.ready.is_set() else num_failed + 1
            if self._drain_asked.is_set():
                return
            log.warning("front end %d ended with exit code %d; starting another", peer.owner, code)
            if num_failed >= MAX_STARTS:
                raise FrontendFailedError(
                    f"{num_failed} front ends in a row ended before they served, the last with exit code"
                    f" {code}; see stderr, or serve with frontend_replicas=0"
                )

    async def _run_one(self, *, counts: bool) -> tuple[Peer, int]:
        """Runs a front end to its end; gives it and its exit code. `counts`: once ready, it is one more."""
        process = await start_frontend(self._listener)
        peer = Peer(self._engine, process.stream, self._setup, self._check_grammar)
        self._peers.add(peer)
        self.pids.add(process.pid)
        try:
            async with anyio.create_task_group() as tasks:
                if self._drain_asked.is_set():
                    tasks.cancel_scope.cancel()
                if counts:
                    tasks.start_soon(self._count_ready, peer)
                await peer.run()
                tasks.cancel_scope.cancel()
        finally:
            self._peers.discard(peer)
            code = await process.end()
            self.pids.discard(process.pid)
        return peer, code

    async def _count_ready(self, peer: Peer) -> None:
        await peer.ready.wait()
        self._num_ready += 1
        if self._num_ready == self._num_replicas:
            self._are_ready.set()


def first_of(group: ExceptionGroup[Exception]) -> Exception:
    """Gives the one error of a group that the caller is to see."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first  # pyright: ignore[reportUnknownArgumentType] - isinstance can't say what is in it
