"""An actor whose messages are handled on an OS thread of its own, in order.

For work that blocks and is bound to its thread, as a CUDA device is. The thread posts outcomes to
the loop and never calls into an actor; the loop side hands them to the askers. Same contract as
`Actor`: unanswered asks fail with `ActorGone` when it stops. Knows no LLM.
"""

import logging
import threading
from collections import deque
from queue import SimpleQueue
from typing import ClassVar

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.reply import Reply
from megallm.core_async.kit.wakeup import Wakeup, open_wakeup
from megallm.core_async.messages import Ask

log = logging.getLogger(__name__)


class ThreadAddress[M]:
    """The address of a `ThreadActor`. `tell` and `ask` are called in the loop."""

    __slots__ = ("_capacity", "_gone", "_inbox", "_name", "_unanswered")

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._capacity = capacity
        self._inbox: SimpleQueue[tuple[M | None, int]] = SimpleQueue()
        self._unanswered: dict[int, Reply[object]] = {}
        self._gone: ActorGone | None = None

    def tell(self, message: M) -> None:
        """See Address."""
        self._put(message, 0)

    async def ask[R](self, message: Ask[R]) -> R:
        """See Address."""
        reply = Reply[R]()
        ticket = id(reply)
        self._put(message, ticket)  # type: ignore[arg-type] - an Ask this actor takes is one of its M
        self._unanswered[ticket] = reply  # type: ignore[assignment] - answered with what handle returned
        return await reply.wait()

    def mark_gone(self, gone: ActorGone) -> None:
        """From now on every call raises `gone`; what was not answered fails. Called once, on stop."""
        self._gone = gone
        for reply in self._unanswered.values():
            reply.fail(gone)
        self._unanswered.clear()

    def _put(self, message: M, ticket: int) -> None:
        if self._gone is not None:
            raise ActorGone(str(self._gone)) from self._gone.__cause__
        if self._inbox.qsize() >= self._capacity:
            name = type(message).__name__
            raise AssertionError(f"mailbox of {self._name} is full: {self._capacity} wait, {name} refused")
        self._inbox.put((message, ticket))


class ThreadActor[M]:
    """Base of an actor with a thread: `on_start`, `handle` and `on_stop` all run on that thread."""

    name: ClassVar[str]
    capacity: ClassVar[int]
    stop_deadline_s: ClassVar[float] = 10.0
    """How long a stop waits for the message in hand before it leaves the (daemon) thread behind."""

    def __init__(self) -> None:
        self.address = ThreadAddress[M](self.name, self.capacity)
        self._outcomes: deque[tuple[int, object]] = deque()
        self._failure: Exception | None = None
        self._wakeup: Wakeup | None = None
        self._is_started = anyio.Event()
        self._is_over = anyio.Event()
        self._has_exited = False

    def on_start(self) -> None:
        """Runs first on the thread; what it raises fails the start."""

    def handle(self, message: M) -> object:
        """Does what the message asks, on the thread, and returns the reply, if it is an ask."""
        raise NotImplementedError

    def on_stop(self) -> None:
        """Runs last on the thread, also after a failure of `on_start` or `handle`."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; ready once `on_start` has returned.

        A cancel lets the message in hand finish, for `stop_deadline_s` at most.
        Raises: what `on_start`, `handle` or `on_stop` raised on the thread.
        """
        self._wakeup = open_wakeup(self._collect)
        thread = threading.Thread(target=self._main, name=f"megallm-{self.name}", daemon=True)
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._wakeup.serve)
                thread.start()
                try:
                    await self._is_started.wait()
                    if self._failure is None:
                        task_status.started()
                        await self._is_over.wait()
                finally:
                    await self._end_thread()
                    tasks.cancel_scope.cancel()
        finally:
            self._mark_gone()
        if self._failure is not None:
            raise self._failure

    async def _end_thread(self) -> None:
        self.address._inbox.put((None, 0))  # noqa: SLF001 - the address is the actor's own other half
        with anyio.move_on_after(self.stop_deadline_s, shield=True):
            while not self._has_exited:
                self._is_over = anyio.Event()
                await self._is_over.wait()
        if self._has_exited and self._wakeup is not None:
            self._wakeup.close()
        elif not self._has_exited:
            log.warning("%s: the thread is still busy after %g s and is left behind", self.name, self.stop_deadline_s)

    def _mark_gone(self) -> None:
        cause = self._failure
        gone = ActorGone(f"{self.name} has stopped" if cause is None else f"{self.name} failed: {cause!r}")
        gone.__cause__ = cause
        self.address.mark_gone(gone)

    def _collect(self) -> None:
        """Hands outcomes to their askers; runs in the loop."""
        self._is_started.set()
        while self._outcomes:
            ticket, answer = self._outcomes.popleft()
            if ticket and (reply := self.address._unanswered.pop(ticket, None)) is not None:  # noqa: SLF001
                reply.set(answer)
        if self._failure is not None or self._has_exited:
            self._is_over.set()

    def _main(self) -> None:
        """The thread: everything below happens on it."""
        assert self._wakeup is not None
        try:
            self.on_start()
            self._wakeup.wake()
            while True:
                message, ticket = self.address._inbox.get()  # noqa: SLF001
                if message is None:
                    break
                answer = self.handle(message)
                if ticket:
                    self._outcomes.append((ticket, answer))
                    self._wakeup.wake()
        except Exception as error:  # noqa: BLE001 - every failure goes up to the supervisor, through run()
            self._failure = error
        try:
            self.on_stop()
        except Exception as error:  # noqa: BLE001 - the same; the first failure is the one reported
            self._failure = self._failure or error
        self._has_exited = True
        self._wakeup.wake()
