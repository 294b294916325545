"""The mailbox: bounded, in order, and nothing that was put is ever lost."""

import asyncio

import anyio
import pytest

from megallm.core_async.kit.mailbox import Mailbox

pytestmark = pytest.mark.anyio


async def test_items_are_taken_in_the_order_they_were_put() -> None:
    """Messages of one sender must not overtake each other."""
    mailbox = Mailbox[int](3)
    for item in (1, 2, 3):
        mailbox.put(item)
    await mailbox.wait()
    assert [mailbox.take(), mailbox.take(), mailbox.take()] == [1, 2, 3]
    assert not mailbox


async def test_an_item_wakes_the_reader() -> None:
    """A reader sleeps until there is something: it never polls."""
    mailbox = Mailbox[int](3)
    taken: list[int] = []

    async def read() -> None:
        await mailbox.wait()
        while mailbox:
            taken.append(mailbox.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        mailbox.put(1)
        mailbox.put(2)
        assert taken == []
    assert taken == [1, 2]


def test_room_shrinks_and_grows() -> None:
    """Admission looks at it before it lets a submission in."""
    mailbox = Mailbox[int](2)
    assert (mailbox.capacity, mailbox.room, len(mailbox)) == (2, 2, 0)
    mailbox.put(1)
    assert (mailbox.room, len(mailbox)) == (1, 1)
    mailbox.take()
    assert mailbox.room == 2


def test_one_item_too_many_is_a_broken_invariant() -> None:
    """A mailbox without a bound hides a reader that has stopped reading."""
    mailbox = Mailbox[int](1)
    mailbox.put(1)
    with pytest.raises(AssertionError, match="1 items, room for 1"):
        mailbox.put(2)
    assert mailbox.take() == 1
    with pytest.raises(IndexError):
        mailbox.take()


async def test_a_cancelled_reader_loses_nothing() -> None:
    """The item that came with the cancel is there for whoever reads next."""
    mailbox = Mailbox[int](2)

    async def read() -> None:
        await mailbox.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        mailbox.put(1)
        tasks.cancel_scope.cancel()
    await mailbox.wait()
    assert mailbox.take() == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_asyncio_cancel_loses_nothing_either() -> None:
    """A memory object stream of anyio does lose the item: its reader owns it before it has run."""
    mailbox = Mailbox[int](2)
    reader = asyncio.create_task(mailbox.wait())
    await anyio.wait_all_tasks_blocked()
    mailbox.put(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert mailbox.take() == 1
