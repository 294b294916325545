"""The leader's books of the other ranks' calls."""

import anyio
import pytest

from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.ranks.together import SHUTDOWN, Gathering

pytestmark = pytest.mark.anyio


async def test_a_call_is_gathered_once_every_rank_has_made_it() -> None:
    """Whether they made theirs before or after."""
    calls = Gathering([1, 2])
    calls.note(1, 0, "pause()")
    done: list[str] = []

    async def gather() -> None:
        await calls.gathered(calls.next_number(), "pause()")
        done.append("pause()")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gather)
        await anyio.wait_all_tasks_blocked()
        assert not done
        calls.note(1, 1, "unpause()")  # the next one, early
        await anyio.wait_all_tasks_blocked()
        assert not done
        calls.note(2, 0, "pause()")
    assert done
    calls.note(2, 1, "unpause()")
    await calls.gathered(calls.next_number(), "unpause()")


async def test_another_call_is_named_with_its_rank() -> None:
    """The program of that rank is what has to be mended."""
    calls = Gathering([1, 2])
    calls.note(1, 0, "pause()")
    calls.note(2, 0, "suspend()")
    with pytest.raises(LifecycleError, match=r"rank 2 called suspend\(\) where this rank called pause\(\)"):
        await calls.gathered(calls.next_number(), "pause()")


async def test_a_rank_that_shuts_down_is_waited_for_no_more() -> None:
    """It makes no other call."""
    calls = Gathering([1])
    calls.note(1, 7, SHUTDOWN)
    for _ in range(2):
        with pytest.raises(LifecycleError, match=r"rank 1 called shutdown\(\)"):
            await calls.gathered(calls.next_number(), "pause()")


async def test_calls_that_wait_at_once_pair_by_their_order_and_end_with_the_ranks() -> None:
    """Two threads of a program may call, as long as all ranks' do so alike."""
    calls = Gathering([1])
    done: list[str] = []

    async def gather(number: int, call: str) -> None:
        await calls.gathered(number, call)
        done.append(call)

    async with anyio.create_task_group() as tasks:
        for call in ("pause()", "unpause()"):
            tasks.start_soon(gather, calls.next_number(), call)
        await anyio.wait_all_tasks_blocked()
        calls.note(1, 1, "unpause()")
        await anyio.wait_all_tasks_blocked()
        assert done == ["unpause()"]
        calls.note(1, 0, "pause()")

    async def gather_in_vain() -> None:
        with pytest.raises(ActorGone):
            await calls.gathered(calls.next_number(), "pause()")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gather_in_vain)
        await anyio.wait_all_tasks_blocked()
        calls.fail(lambda: ActorGone("gone"))
    calls.fail(lambda: ActorGone("gone"))


async def test_what_comes_for_a_call_that_was_given_up_is_not_kept() -> None:
    """A rank that is always late would fill the books."""
    calls = Gathering([1, 2])
    for number in range(3):
        calls.give_up(calls.next_number())
        calls.note(1, number, "pause()")
    assert not vars(calls)["_made"]  # which is not public: nothing else shows it
