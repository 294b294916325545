"""The reply slot: one outcome, whoever of the two comes first, and whoever has left."""

import anyio
import pytest

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.reply import Reply, gone_error
from tests.freed import watch_error, without_collector

pytestmark = pytest.mark.anyio


class RefusedError(Exception):
    """An error of a class whose instances can be watched."""


async def test_an_answer_that_is_there_is_given_at_once() -> None:
    """An actor often answers before the asker has begun to wait."""
    reply = Reply[int]()
    assert not reply.is_done
    reply.set(3)
    assert reply.is_done
    assert await reply.wait() == 3


async def test_an_answer_wakes_the_one_who_waits() -> None:
    """The usual order of things."""
    reply = Reply[int]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for, reply, 5)
        await anyio.wait_all_tasks_blocked()
        reply.set(5)


async def wait_for(reply: Reply[int], expected: int) -> None:
    """Waits for an answer and compares."""
    assert await reply.wait() == expected


async def test_an_error_in_place_of_the_answer_is_raised() -> None:
    """A refused asker has to hear why."""
    reply = Reply[int]()
    error = ValueError("no")
    reply.fail(error)
    with pytest.raises(ValueError, match="no") as caught:
        await reply.wait()
    assert caught.value is error


async def test_only_the_first_outcome_counts() -> None:
    """An actor that stops fails what is unanswered, and must not take back what it has said."""
    answered, failed = Reply[int](), Reply[int]()
    answered.set(1)
    answered.fail(ValueError())
    answered.set(2)
    assert await answered.wait() == 1
    failed.fail(KeyError("first"))
    failed.set(1)
    failed.fail(ValueError())
    with pytest.raises(KeyError, match="first"):
        await failed.wait()


@pytest.mark.parametrize("outcome", ["set", "fail"])
async def test_an_outcome_for_an_asker_who_was_cancelled_is_no_error(outcome: str) -> None:
    """The answerer can't know, and must not die of it."""
    reply = Reply[int]()
    with anyio.move_on_after(0):
        await reply.wait()
    assert not reply.is_done
    if outcome == "set":
        reply.set(1)
    else:
        reply.fail(ValueError())
    assert reply.is_done


async def test_a_cancel_leaves_the_slot_as_it_is() -> None:
    """Waiting again must work, whatever cut the first wait short."""
    reply = Reply[int]()
    with anyio.move_on_after(0):
        await reply.wait()
    reply.set(4)
    assert await reply.wait() == 4


async def test_an_error_that_was_raised_is_freed_without_the_garbage_collector() -> None:
    """An error keeps its traceback's frames, and they keep prompts: a cycle holds them for long."""
    reply = Reply[int]()
    reply.fail(RefusedError())
    with without_collector():
        watched = await watch_error(reply.wait(), RefusedError)
        assert watched() is None


def test_the_error_of_an_actor_that_is_gone_says_why() -> None:
    """Only the cause tells a reader of the log what to do."""
    stopped, failed = gone_error("worker", None), gone_error("worker", ValueError("broken"))
    assert isinstance(stopped, ActorGone)
    assert (str(stopped), stopped.__cause__) == ("worker has stopped", None)
    assert str(failed) == "worker failed: ValueError('broken')"
    assert isinstance(failed.__cause__, ValueError)
