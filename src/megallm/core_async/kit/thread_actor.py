"""An actor whose messages are handled on an OS thread of its own, in order.

For work that blocks and is bound to its thread, as a CUDA device is. The thread leaves outcomes and
wakes the loop; the loop side hands them to the askers. Same contract as `Actor`: unanswered asks
fail with `ActorGone` when it stops. Knows no LLM.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import ClassVar

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.reply import Reply, gone_error
from megallm.core_async.kit.wakeup import Wakeup, open_wakeup
from megallm.core_async.messages.ask import Ask

log = logging.getLogger(__name__)

type Letter[M] = tuple[M, int] | None
"""A message and the ticket of its answer, 0 for none; None only makes the thread look up."""


class ThreadAddress[M]:
    """The address of a `ThreadActor`. `tell` and `ask` are called in the loop."""

    __slots__ = ("_capacity", "_inbox", "_make_gone", "_name", "_unanswered")

    def __init__(self, name: str, capacity: int, inbox: "SimpleQueue[Letter[M]]") -> None:
        self._name = name
        self._capacity = capacity
        self._inbox = inbox
        self._unanswered: dict[int, Reply[object]] = {}
        self._make_gone: Callable[[], ActorGone] | None = None

    def tell(self, message: M) -> None:
        """See Address."""
        self._put(message, 0)

    def send[R](self, message: Ask[R]) -> Reply[R]:
        """See Address."""
        reply: Reply[R] = Reply()
        ticket = id(reply)
        self._put(message, ticket)  # type: ignore[arg-type] - an Ask this actor takes is one of its M
        self._unanswered[ticket] = reply  # type: ignore[assignment] - answered with what handle returned
        return reply

    async def ask[R](self, message: Ask[R]) -> R:
        """See Address."""
        return await self.send(message).wait()

    def answer(self, ticket: int, value: object) -> None:
        """Gives an asker its answer. Called by the actor, in the loop."""
        self._unanswered.pop(ticket).set(value)

    def close(self, make_gone: Callable[[], ActorGone]) -> None:
        """From now on every call raises an error made by `make_gone`. Called by the actor when it stops."""
        self._make_gone = make_gone

    def fail_unanswered(self, make_gone: Callable[[], ActorGone]) -> None:
        """Fails what was not answered. Called by the actor when it has stopped."""
        while self._unanswered:
            _, reply = self._unanswered.popitem()
            reply.fail(make_gone())

    def _put(self, message: M, ticket: int) -> None:
        if self._make_gone is not None:
            raise self._make_gone()
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
    exit_deadline_s: ClassVar[float] = 60.0
    """How long the end of the program waits for a thread that was left behind."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Letter[M]] = SimpleQueue()
        self.address = ThreadAddress[M](self.name, self.capacity, self._inbox)
        self._outcomes: deque[tuple[int, object]] = deque()
        """Answers on their way to the loop; the thread appends, the loop takes."""
        self._is_stopping = False
        """Set by the loop: the thread handles nothing more."""
        self._is_ready = False
        self._failure: Exception | None = None
        self._has_exited = False
        """These three are set by the thread, which wakes the loop after each."""

    def on_start(self) -> None:
        """Runs first on the thread; what it raises fails the start."""

    def handle(self, message: M) -> object:
        """Does what the message asks, on the thread, and returns the reply, if it is an ask."""
        raise NotImplementedError

    def on_stop(self) -> None:
        """Runs last on the thread, also after a failure of `on_start` or `handle`."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; ready once `on_start` has returned.

        A cancel lets the message in hand finish, for `stop_deadline_s` at most; those behind it are dropped.
        Raises: what `on_start`, `handle` or `on_stop` raised on the thread, also when cancelled.
        """
        try:
            wakeup = open_wakeup()
            thread = threading.Thread(
                target=self._main, args=(wakeup,), name=f"megallm-{self.name}", daemon=True
            )
            thread.start()
            at_exit = weakref.finalize(self, _outlast, thread, self.exit_deadline_s)
            try:
                await self._serve(wakeup, task_status)
            finally:
                await self._end(wakeup, thread)
                if self._has_exited:
                    at_exit.detach()
        finally:
            self.address.close(self._make_gone)
            self.address.fail_unanswered(self._make_gone)
            if self._failure is not None:
                raise self._failure

    async def _serve(self, wakeup: Wakeup, task_status: TaskStatus[None]) -> None:
        """Hands out answers until the thread fails."""
        while not self._is_ready and self._failure is None:
            await self._news(wakeup)
        if self._failure is None:
            task_status.started()
        while self._failure is None:
            await self._news(wakeup)

    async def _end(self, wakeup: Wakeup, thread: threading.Thread) -> None:
        if self._failure is None:  # else its own error has to reach the supervisor before any ActorGone does
            self.address.close(self._make_gone)
        self._is_stopping = True
        self._inbox.put(None)
        with anyio.move_on_after(self.stop_deadline_s, shield=True):
            while not self._has_exited:
                await self._news(wakeup)
        self._answer()
        if self._has_exited:
            thread.join()  # it may still be inside its last wake(), which needs the descriptor
            wakeup.close()
        else:
            late_s = self.stop_deadline_s
            log.warning("%s: the thread is still busy after %g s and is left behind", self.name, late_s)

    async def _news(self, wakeup: Wakeup) -> None:
        await wakeup.wait()
        self._answer()

    def _answer(self) -> None:
        while self._outcomes:
            self.address.answer(*self._outcomes.popleft())

    def _make_gone(self) -> ActorGone:
        return gone_error(self.name, self._failure)

    # ---- on the thread -------------------------------------------------------------------------

    def _main(self, wakeup: Wakeup) -> None:
        try:
            self.on_start()
            self._is_ready = True
            wakeup.wake()
            self._handle_all(wakeup)
        except BaseException as error:  # noqa: BLE001 - every failure goes up to the supervisor, through run()
            self._fail(error, wakeup)
        try:
            self.on_stop()
        except BaseException as error:  # noqa: BLE001 - the same; the first failure is the one reported
            self._fail(error, wakeup)
        self._has_exited = True
        wakeup.wake()

    def _handle_all(self, wakeup: Wakeup) -> None:
        while (letter := self._inbox.get()) is not None and not self._is_stopping:
            message, ticket = letter
            answer = self.handle(message)
            if ticket:
                self._outcomes.append((ticket, answer))
                wakeup.wake()

    def _fail(self, error: BaseException, wakeup: Wakeup) -> None:
        if self._failure is not None:
            return
        if not isinstance(error, Exception):  # SystemExit ends a thread, not the program
            wrapped = RuntimeError(f"{self.name} raised {error!r} on its thread")
            wrapped.__cause__ = error
            error = wrapped
        self._failure = error
        wakeup.wake()


def _outlast(thread: threading.Thread, deadline_s: float) -> None:
    """Waits at exit for a thread that is still busy.

    An interpreter that is gone ends its threads where they ask for the GIL, and unwinding C++ code, as
    torch's, aborts the process (python/cpython gh-87135, mended in 3.14).
    """
    thread.join(deadline_s)
