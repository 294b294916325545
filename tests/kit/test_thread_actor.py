"""Actors with a thread: the contract of an actor, kept across the thread."""

import anyio
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.errors import ActorGone
from tests.askers import Outcomes
from tests.checkpoints import AtAwait
from tests.freed import open_descriptors
from tests.kit.callers import Call, Caller, Hold, boom, nothing, threads_of
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_everything_happens_on_one_thread_and_in_order() -> None:
    """A CUDA device is the thread's, and a model must not be called from two."""
    actor = Caller()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        assert actor.events == ["start"]
        actor.address.tell(Call(nothing))
        assert await actor.address.ask(Call(lambda: 5)) == 5
        tasks.cancel_scope.cancel()
    assert actor.events == ["start", "handle", "handle", "stop"]
    assert actor.threads == {"megallm-caller"}
    assert threads_of(actor) == []


async def test_many_asks_at_once_are_all_answered() -> None:
    """Answers that come faster than the loop looks share a wake-up: none may be left lying."""
    actor = Caller()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        async with anyio.create_task_group() as outside:
            for number in range(200):
                while len(outcomes.values) < number - 2:
                    await anyio.lowlevel.checkpoint()
                await outcomes.ask(outside, actor.address, Call(lambda number=number: number))
        tasks.cancel_scope.cancel()
    assert sorted(outcomes.values) == list(range(200))


async def test_an_ask_from_before_the_start_is_answered() -> None:
    """The thread may be ready and have answered before the loop looks for the first time."""
    actor = Caller()
    outcomes = Outcomes()
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as outside:
            for number in range(3):
                await outcomes.ask(outside, actor.address, Call(lambda number=number: number))
            await tasks.start(actor.run)
        tasks.cancel_scope.cancel()
    assert sorted(outcomes.values) == [0, 1, 2]


async def test_the_start_waits_for_on_start() -> None:
    """An engine that says it is ready has its model bound."""
    hold = Hold()
    actor = Caller(start=hold)
    has_started = anyio.Event()

    async def start(tasks: TaskGroup) -> None:
        await tasks.start(actor.run)
        has_started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start, tasks)
        await hold.begun()
        assert not has_started.is_set()
        hold.release()
        await has_started.wait()
        tasks.cancel_scope.cancel()


async def test_a_failing_start_raises_its_error_and_leaves_nothing() -> None:
    """A model that is refused must not keep a thread, and the user must see why, not a group."""
    before = open_descriptors()
    actor = Caller(start=boom)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ValueError, match="broken"):
            await tasks.start(actor.run)
    assert actor.events == ["start", "stop"]
    assert threads_of(actor) == []
    assert open_descriptors() == before
    with pytest.raises(ActorGone, match="caller failed: ValueError"):
        actor.address.tell(Call(nothing))


async def test_a_full_mailbox_fails_loudly() -> None:
    """Two plans are in flight at most: more is a pump that lost count."""
    actor = Caller()
    for _ in range(4):
        actor.address.tell(Call(nothing))
    with pytest.raises(AssertionError, match="mailbox of caller is full: 4 wait, Call refused"):
        actor.address.tell(Call(nothing))
    with pytest.raises(AssertionError, match="mailbox of caller is full"):
        await actor.address.ask(Call(nothing))
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        while len(actor.events) < 5:
            await anyio.lowlevel.checkpoint()
        assert await actor.address.ask(Call(lambda: 5)) == 5
        tasks.cancel_scope.cancel()


async def test_an_asker_that_is_cancelled_disturbs_nobody() -> None:
    """Its answer comes all the same, and the next ask must not get it."""
    actor = Caller()
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        for number in range(5):
            with anyio.CancelScope() as scope:
                await AtAwait(1, actor.address.ask(Call(lambda: "nobody's")), scope.cancel)
            assert await actor.address.ask(Call(lambda number=number: number)) == number
        tasks.cancel_scope.cancel()


async def test_a_reply_can_be_awaited_later_than_the_ask_is_sent_or_never() -> None:
    """The pump asks for a result together with the step, and looks at it when it comes by."""
    actor = Caller()
    replies = [actor.address.send(Call(lambda: 5)), actor.address.send(Call(nothing))]
    async with anyio.create_task_group() as tasks:
        await tasks.start(actor.run)
        assert await replies[0].wait() == 5
        tasks.cancel_scope.cancel()
    assert replies[1].is_done
    with pytest.raises(ActorGone):
        actor.address.send(Call(nothing))
