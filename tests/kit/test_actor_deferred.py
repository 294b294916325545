"""Asks that are answered later than they are handled, or awaited later than they are sent."""

from typing import ClassVar

import anyio
import pytest

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.actor import Actor, Refusal
from megallm.core_async.kit.reply import Reply
from megallm.core_async.messages import Ask
from tests.askers import Outcomes
from tests.checkpoints import AtAwait

pytestmark = pytest.mark.anyio


class Wait(Ask[str], frozen=True):
    """Be answered by the next `Open`."""

    is_refused: bool = False


class Open(Ask[int], frozen=True):
    """Answer all that wait; gives how many did."""


class Crash(Ask[int], frozen=True):
    """Break."""


class Door(Actor[Wait | Open | Crash]):
    """Lets askers wait until somebody opens."""

    name: ClassVar[str] = "door"
    capacity: ClassVar[int] = 8

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Reply[object]] = []

    async def handle(self, message: Wait | Open | Crash) -> object:
        """See the messages."""
        match message:
            case Wait(is_refused):
                if is_refused:
                    self.defer()
                    raise Refusal(PermissionError("not you"))
                self.waiting.append(self.defer())
                return "nobody gets this"
            case Open():
                waiting, self.waiting = self.waiting, []
                for reply in waiting:
                    reply.set("open")
                return len(waiting)
            case Crash():
                raise ValueError("broken")


async def test_a_deferred_ask_is_answered_when_its_time_has_come() -> None:
    """A pause replies once the last step is in, and the actor handles other messages meanwhile."""
    door = Door()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        async with anyio.create_task_group() as askers:
            for _ in range(2):
                await outcomes.ask(askers, door.address, Wait())
            await anyio.wait_all_tasks_blocked()
            assert outcomes.values == []
            assert await door.address.ask(Open()) == 2
        assert await door.address.ask(Open()) == 0
        tasks.cancel_scope.cancel()
    assert outcomes.values == ["open", "open"]


@pytest.mark.parametrize("ends_by", ["cancel", "crash"])
async def test_a_deferred_ask_fails_when_the_actor_stops_first(ends_by: str) -> None:
    """It is no longer in hand and in no mailbox, and its asker may be outside the task group."""
    door = Door()
    outcomes = Outcomes()

    async def crash() -> None:
        with pytest.raises(ValueError, match="broken"):
            await door.run()

    async with anyio.create_task_group() as outside, anyio.create_task_group() as tasks:
        tasks.start_soon(door.run if ends_by == "cancel" else crash)
        await outcomes.ask(outside, door.address, Wait())
        await outcomes.ask(outside, door.address, Wait())
        await anyio.wait_all_tasks_blocked()
        assert len(door.waiting) == 2
        if ends_by == "crash":
            door.address.tell(Crash())
        else:
            tasks.cancel_scope.cancel()
    why = "door has stopped" if ends_by == "cancel" else "door failed: ValueError('broken')"
    assert [str(error) for error in outcomes.errors] == [why] * 2
    assert outcomes.errors[0] is not outcomes.errors[1]


async def test_a_deferred_asker_that_is_cancelled_disturbs_nobody() -> None:
    """Its answer is dropped; the others get theirs."""
    door = Door()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        with anyio.CancelScope() as scope:
            await AtAwait(1, door.address.ask(Wait()), scope.cancel)
        async with anyio.create_task_group() as askers:
            await outcomes.ask(askers, door.address, Wait())
            await anyio.wait_all_tasks_blocked()
            assert await door.address.ask(Open()) == 2
        tasks.cancel_scope.cancel()
    assert outcomes.values == ["open"]


async def test_a_deferred_ask_can_still_be_refused() -> None:
    """A handler may find out late that it can't do what it is asked."""
    door = Door()
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        with pytest.raises(PermissionError, match="not you"):
            await door.address.ask(Wait(is_refused=True))
        tasks.cancel_scope.cancel()


async def test_only_an_ask_in_hand_can_be_deferred() -> None:
    """Nobody waits for the reply of a tell, and between messages there is none."""
    door = Door()
    door.address.tell(Open())
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="no message is in hand"):
            door.defer()
        tasks.cancel_scope.cancel()
    door = Door()
    door.address.tell(Wait())
    with pytest.raises(AssertionError, match="Wait was told, not asked: nobody waits for a reply"):
        await door.run()


async def test_a_reply_can_be_awaited_later_than_the_ask_is_sent() -> None:
    """The pump asks for a result together with the step, and looks at it when it comes by."""
    door = Door()
    early = door.address.send(Open())
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        await anyio.wait_all_tasks_blocked()
        assert early.is_done
        assert await early.wait() == 0
        tasks.cancel_scope.cancel()


async def test_replies_that_nobody_awaits_are_no_error() -> None:
    """Neither an answer, nor that the actor has gone."""
    door = Door()
    replies = [door.address.send(Open()), door.address.send(Wait())]
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert [reply.is_done for reply in replies] == [True, True]
    with pytest.raises(ActorGone):
        door.address.send(Open())
