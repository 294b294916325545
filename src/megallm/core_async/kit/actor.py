"""Actors: one task, one bounded mailbox, one owner of some state.

`tell` never waits; `ask` waits for the reply its message type promises. When an actor stops, for
whatever reason, every ask it has not answered fails with `ActorGone`, callers outside the task
group included. Knows no LLM.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import anyio
from anyio.abc import TaskStatus

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.mailbox import Mailbox
from megallm.core_async.kit.reply import Reply, gone_error
from megallm.core_async.messages.ask import Ask

type Envelope[M] = tuple[M, Reply[object] | None]
"""A message and, when it is an ask, the slot for its answer."""


class Refusal(Exception):  # noqa: N818 - not an error of the actor: it wraps the one the asker gets
    """Raised by a handler to answer an ask with an error; the actor goes on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Address[M](Protocol):
    """Where an actor is reached; all that others hold of it."""

    def tell(self, message: M) -> None:
        """Leaves a message and returns at once.

        Raises: ActorGone when the actor has stopped. AssertionError when the mailbox is full:
        backpressure lives at admission, so a full mailbox is a broken invariant.
        """
        ...

    def send[R](self, message: Ask[R]) -> Reply[R]:
        """Leaves a message and gives the slot of its reply, to be awaited later or never.

        Raises: as `tell`.
        """
        ...

    async def ask[R](self, message: Ask[R]) -> R:
        """Leaves a message and waits for its reply.

        A cancel abandons the reply; the message is handled all the same.
        Raises: as `tell`, the error the actor refused with, and ActorGone when it stops first.
        """
        ...


class MailboxAddress[M]:
    """The address of an `Actor`: writes to its mailbox."""

    __slots__ = ("_mailbox", "_make_gone", "_name")

    def __init__(self, name: str, mailbox: Mailbox[Envelope[M]]) -> None:
        self._name = name
        self._mailbox = mailbox
        self._make_gone: Callable[[], ActorGone] | None = None

    @property
    def room(self) -> int:
        """How many more messages the mailbox takes."""
        return self._mailbox.room

    def tell(self, message: M) -> None:
        """See Address."""
        self._put((message, None))

    def send[R](self, message: Ask[R]) -> Reply[R]:
        """See Address."""
        reply: Reply[R] = Reply()
        self._put((message, reply))  # type: ignore[arg-type] - an Ask this actor takes is one of its M
        return reply

    async def ask[R](self, message: Ask[R]) -> R:
        """See Address."""
        return await self.send(message).wait()

    def mark_gone(self, make_gone: Callable[[], ActorGone]) -> None:
        """From now on every call raises an error made by `make_gone`. Called by the actor when it stops."""
        self._make_gone = make_gone

    def _put(self, envelope: Envelope[M]) -> None:
        if self._make_gone is not None:
            raise self._make_gone()
        if self._mailbox.room <= 0:
            what = f"{self._mailbox.capacity} wait, {type(envelope[0]).__name__} refused"
            raise AssertionError(f"mailbox of {self._name} is full: {what}")
        self._mailbox.put(envelope)


class Actor[M]:
    """Base of every actor: `run` is its task, `handle` its behaviour, `address` its mailbox.

    `handle` finishes or the actor dies: compute, then commit without an await between.
    """

    name: ClassVar[str]
    capacity: ClassVar[int]
    """Messages the mailbox holds; a subclass states the reason beside it."""

    def __init__(self) -> None:
        self._mailbox = Mailbox[Envelope[M]](self.capacity)
        self.address = MailboxAddress[M](self.name, self._mailbox)
        self._in_hand: Envelope[M] | None = None
        self._deferred: set[Reply[object]] = set()

    async def handle(self, message: M) -> object:
        """Does what the message asks and returns the reply, if it is an ask.

        Raises: Refusal to answer with an error; anything else kills the actor.
        """
        raise NotImplementedError

    def defer(self) -> Reply[object]:
        """Takes the reply of the ask in hand out of `handle`'s hands, to be given later.

        It fails with ActorGone when the actor stops first. To be called while `handle` runs.
        """
        assert self._in_hand is not None, "no message is in hand"
        message, reply = self._in_hand
        assert reply is not None, f"{type(message).__name__} was told, not asked: nobody waits for a reply"
        self._deferred = {deferred for deferred in self._deferred if not deferred.is_done}
        self._deferred.add(reply)
        return reply

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Handles messages in the order they came, until cancelled; ready once started.

        Raises: what `handle` raised.
        """
        cause: Exception | None = None
        try:
            task_status.started()
            while True:
                await self._mailbox.wait()
                while self._mailbox:  # all that waits, without a trip through the loop for each
                    await self._deliver(self._mailbox.take())
        except Exception as error:
            cause = error
            raise
        finally:
            self._stop(cause)
            del cause  # its traceback holds this frame

    async def _deliver(self, envelope: Envelope[M]) -> None:
        self._in_hand = envelope
        message, reply = envelope
        try:
            answer = await self.handle(message)
        except Refusal as refusal:
            if reply is None:
                raise
            reply.fail(refusal.error)
        else:
            if reply is not None and reply not in self._deferred:
                reply.set(answer)
        self._in_hand = None

    def _stop(self, cause: Exception | None) -> None:
        """Fails what was not answered, and all that comes. Synchronous: nothing can cut it short."""
        make_gone = partial(gone_error, self.name, cause)
        self.address.mark_gone(make_gone)
        unanswered = [] if self._in_hand is None else [self._in_hand]
        while self._mailbox:
            unanswered.append(self._mailbox.take())
        replies = [reply for _, reply in unanswered if reply is not None]
        for reply in [*replies, *self._deferred]:
            reply.fail(make_gone())
