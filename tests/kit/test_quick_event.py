"""The loop's own events, which every streamed token goes through."""

import anyio
import pytest

from megallm.core_async.kit.quick_event import event_maker
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_a_task_waits_until_the_event_is_set() -> None:
    """A reader must not see tokens that are not there, nor miss those that are."""
    event, order = event_maker()(), list[str]()

    async def wait() -> None:
        await event.wait()
        order.append("went on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        order.append("set")
        event.set()
        event.set()
    assert order == ["set", "went on"]


async def test_an_event_that_was_set_holds_nobody_up() -> None:
    """What it tells may have happened before somebody asks."""
    event = event_maker()()
    event.set()
    await event.wait()


async def test_a_cancelled_wait_ends_and_the_event_may_still_be_set() -> None:
    """The client has left; the writer does not know, and must not fail."""
    event = event_maker()()
    with anyio.move_on_after(0) as scope:
        await event.wait()
    assert scope.cancelled_caught
    event.set()
