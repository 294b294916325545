"""Actors: messages in, answers out, in order; refusals, bounds, answers given later."""

import warnings
import weakref

import anyio
import pytest

from megallm.core_async.kit.actor import Refusal
from tests.checkpoints import AtAwait
from tests.freed import watch_error, without_collector
from tests.kit.small_actors import BusyError, Crash, Double, Refuse, Worker

pytestmark = pytest.mark.anyio


async def test_an_ask_is_answered_with_what_handle_returned() -> None:
    """The one thing an actor is for."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        assert await worker.address.ask(Double(4)) == 8
        assert await worker.address.ask(Double(5, num_turns=3)) == 10
        tasks.cancel_scope.cancel()


async def test_messages_are_handled_in_the_order_they_came() -> None:
    """Senders rely on it: a submission comes before the abort that takes it back."""
    worker = Worker()
    messages = [Double(1, num_turns=2), Double(2), Double(3)]
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        for message in messages:
            worker.address.tell(message)
        assert worker.handled == []
        assert await worker.address.ask(Double(4)) == 8
        tasks.cancel_scope.cancel()
    assert worker.handled == [*messages, Double(4)]


async def test_what_came_before_the_start_is_handled() -> None:
    """Whoever builds the actors may hand out addresses before the tasks run."""
    worker = Worker()
    worker.address.tell(Double(1))
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        assert await worker.address.ask(Double(2)) == 4
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(1), Double(2)]


async def test_a_refusal_answers_one_ask_and_the_actor_goes_on() -> None:
    """A full waiting list is the caller's matter, not the engine's end."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        with pytest.raises(BusyError, match="busy"):
            await worker.address.ask(Refuse())
        assert await worker.address.ask(Double(1)) == 2
        tasks.cancel_scope.cancel()


async def test_a_refused_asker_leaves_no_cycle() -> None:
    """Errors keep frames alive; under load thousands of refusals must go without the garbage collector."""
    worker = Worker()
    with without_collector():
        async with anyio.create_task_group() as tasks:
            await tasks.start(worker.run)
            watched = await watch_error(worker.address.ask(Refuse()), BusyError)
            assert watched() is None
            tasks.cancel_scope.cancel()


async def test_the_refusal_of_a_tell_is_a_crash() -> None:
    """Nobody would ever hear of it."""
    worker = Worker()
    worker.address.tell(Refuse())
    with pytest.raises(Refusal, match="busy"):
        await worker.run()


async def test_an_asker_that_is_cancelled_disturbs_nobody() -> None:
    """The message is handled all the same, and its answer, which nobody wants, is no error."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        with anyio.CancelScope() as scope:
            await AtAwait(1, worker.address.ask(Double(1, num_turns=3)), scope.cancel)
        assert scope.cancelled_caught
        assert await worker.address.ask(Double(2)) == 4
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(1, num_turns=3), Double(2)]


async def test_a_full_mailbox_fails_loudly_and_loses_nothing() -> None:
    """Backpressure lives at admission: who gets here with one message too many has lost count."""
    worker = Worker()
    for value in range(4):
        assert worker.address.room == 4 - value
        worker.address.tell(Double(value))
    with pytest.raises(AssertionError, match="mailbox of worker is full: 4 wait, Crash refused"):
        worker.address.tell(Crash())
    with pytest.raises(AssertionError, match="mailbox of worker is full: 4 wait, Double refused"):
        await worker.address.ask(Double(9))
    async with anyio.create_task_group() as tasks:
        await tasks.start(worker.run)
        await anyio.wait_all_tasks_blocked()
        assert worker.address.room == 4
        assert await worker.address.ask(Double(4)) == 8
        tasks.cancel_scope.cancel()
    assert worker.handled == [Double(value) for value in range(5)]


async def test_an_actor_that_never_ran_leaves_nothing_behind() -> None:
    """When one actor fails to start, those after it are dropped as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = Worker()
        worker.address.tell(Double(1))
        watched = weakref.ref(worker)
        del worker
        assert watched() is None
    assert caught == []
