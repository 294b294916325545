"""Outboxes: readers that are slow, cancelled or gone, and a writer that never notices."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.kit.outbox import Outbox, Outboxes
from tests.freed import watch_error, without_collector

pytestmark = pytest.mark.anyio


class EndedError(Exception):
    """What a reader gets when the writer is gone."""


class Closings:
    """Counts what the outboxes report."""

    def __init__(self) -> None:
        self.num = 0

    def add(self) -> None:
        """Counts one."""
        self.num += 1


def ignore(outbox: Outbox[int]) -> None:
    """Takes no notice of a reader that left."""


async def test_a_reader_waits_for_the_next_item() -> None:
    """A stream shows a token as soon as it is there."""
    outbox = Outbox[int]([1], ignore)
    taken: list[list[int]] = []

    async def read() -> None:
        while len(taken) < 2:
            taken.append(await outbox.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for item in (1, 2):
            await anyio.wait_all_tasks_blocked()
            outbox.put(item)
    assert taken == [[1], [2]]


async def test_a_slow_reader_gets_all_that_piled_up_at_once() -> None:
    """The writer is the batch of all requests: it never waits for one of them."""
    outbox = Outbox[int]([1], ignore)
    for item in range(1000):
        outbox.put(item)
    assert await outbox.take() == list(range(1000))
    assert outbox.take_nowait() == []
    outbox.put(7)
    assert outbox.take_nowait() == [7]


async def test_a_cancelled_take_loses_nothing() -> None:
    """A reader with a timeout must find its tokens at the next try."""
    outbox = Outbox[int]([1], ignore)
    taken: list[int] = []

    async def read() -> None:
        taken.extend(await outbox.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        outbox.put(1)
        tasks.cancel_scope.cancel()
    outbox.put(2)
    assert taken + outbox.take_nowait() == [1, 2]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await outbox.take()
    outbox.put(3)
    assert await outbox.take() == [3]


@given(
    script=st.lists(st.sampled_from(["put", "take", "cancelled take"]), max_size=30),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_every_item_is_taken_once_and_in_order(script: list[str], backend: str) -> None:
    """Whatever the order of puts, takes and cancels."""

    async def play() -> None:
        outbox = Outbox[int]([1], ignore)
        num_put, taken = 0, list[int]()
        for action in script:
            if action == "put":
                outbox.put(num_put)
                num_put += 1
            elif action == "take":
                taken += outbox.take_nowait() if len(taken) == num_put else await outbox.take()
            else:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    taken += await outbox.take()
        taken += outbox.take_nowait()
        assert taken == list(range(num_put))

    anyio.run(play, backend=backend)


async def test_a_failed_outbox_gives_its_items_before_the_error() -> None:
    """What was generated before the end is the reader's."""
    outbox = Outbox[int]([1], ignore)
    outbox.put(1)
    outbox.fail(EndedError)
    outbox.fail(ValueError)
    assert await outbox.take() == [1]
    errors: list[Exception] = []
    for _ in range(2):
        with pytest.raises(EndedError) as caught:
            await outbox.take()
        errors.append(caught.value)
    assert errors[0] is not errors[1], "each take raises an error of its own"


async def test_a_failure_wakes_the_reader() -> None:
    """A reader of a dead engine must not wait for ever."""
    outbox = Outbox[int]([1], ignore)

    async def read() -> None:
        with pytest.raises(EndedError):
            await outbox.take()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        outbox.fail(EndedError)


async def test_the_error_of_an_outbox_leaves_no_cycle() -> None:
    """A cycle through the outbox would keep the reader's frames, and all they hold."""
    outbox = Outbox[int]([1], ignore)
    outbox.fail(EndedError)
    with without_collector():
        watched = await watch_error(outbox.take(), EndedError)
        assert watched() is None


async def test_a_reader_that_leaves_is_reported_once_and_gets_no_more() -> None:
    """Its request is to end now, and what still comes for it is nobody's."""
    left: list[Outbox[int]] = []
    outbox = Outbox[int]([1, 2], left.append)
    outbox.put(1)
    assert not outbox.is_closed
    outbox.close()
    outbox.close()
    outbox.put(2)
    assert left == [outbox]
    assert outbox.is_closed
    assert outbox.take_nowait() == []


async def test_nobody_waits_at_an_outbox_whose_reader_has_left() -> None:
    """Another task of the reader would wait for ever: nothing comes any more."""
    outbox = Outbox[int]([1, 2], ignore)

    async def read() -> None:
        with pytest.raises(AssertionError, match=r"reader of \(1, 2\) has left"):
            await outbox.take()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        outbox.close()
    await read()


async def test_one_outbox_reads_all_the_keys_of_a_submission() -> None:
    """A batch of prompts has one reader."""
    outboxes = Outboxes[int](Closings().add)
    outbox = outboxes.open([3, 4])
    other = outboxes.open([5])
    assert outbox.keys == (3, 4)
    assert outboxes.find(3) is outboxes.find(4) is outbox
    assert outboxes.find(5) is other
    assert outboxes.find(6) is None
    assert len(outboxes) == 3


async def test_a_key_that_ended_is_forgotten_and_not_reported() -> None:
    """Its producer ended it, so nobody needs to be told."""
    closings = Closings()
    outboxes = Outboxes[int](closings.add)
    outbox = outboxes.open([1, 2])
    outboxes.end(1)
    outboxes.end(1)
    assert outboxes.find(1) is None
    outbox.close()
    assert outboxes.take_closed() == [2]
    assert outboxes.take_closed() == []
    assert closings.num == 1
    assert len(outboxes) == 0


async def test_a_reader_of_ended_keys_leaves_unnoticed() -> None:
    """Closing is what every reader does at last: it must not wake the pump."""
    closings = Closings()
    outboxes = Outboxes[int](closings.add)
    outbox = outboxes.open([1])
    outboxes.end(1)
    outbox.close()
    assert (closings.num, outboxes.take_closed()) == (0, [])


async def test_a_key_ended_early_is_reported_once() -> None:
    """The scheduler is to drop a request whose text has reached its stop word, and hears of it once."""
    closings = Closings()
    outboxes = Outboxes[int](closings.add)
    outbox = outboxes.open([1, 2])
    outboxes.end_early(1)
    outboxes.end_early(1)
    outboxes.end(1)
    outbox.close()
    assert outboxes.take_closed() == [1, 2]
    assert closings.num == 2


async def test_when_all_fail_each_reader_gets_an_error_of_its_own() -> None:
    """An error raised in two tasks at once would mix their tracebacks."""
    closings = Closings()
    outboxes = Outboxes[int](closings.add)
    readers = [outboxes.open([1, 2]), outboxes.open([3])]
    readers[0].put(7)
    outboxes.fail_all(EndedError)
    assert len(outboxes) == 0
    assert await readers[0].take() == [7]
    errors: list[Exception] = []
    for reader in readers:
        with pytest.raises(EndedError) as caught:
            await reader.take()
        errors.append(caught.value)
        reader.close()
    assert errors[0] is not errors[1]
    assert (closings.num, outboxes.take_closed()) == (0, [])


async def test_no_outbox_opens_after_all_have_failed() -> None:
    """It would never be written to."""
    outboxes = Outboxes[int](Closings().add)
    outboxes.fail_all(EndedError)
    with pytest.raises(EndedError):
        outboxes.open([1])
