"""Waiting for other ranks, on virtual time: who does not answer is lost, who answers is waited for."""

from collections.abc import Callable
from functools import partial

import anyio
import pytest
from msgspec import Struct
from trio.testing import MockClock

from megallm.core_async.errors import RankLostError
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.ranks.watch import (
    ANSWER_S,
    CALL_ANSWER_S,
    CALL_PATIENCE_S,
    PATIENCE_S,
    Awaited,
    Watch,
    watch_of_calls,
)
from megallm.core_async.transport.rank_frames import AskWhere


class FakePeer:
    """A rank that may answer what it is asked."""

    def __init__(self, name: int, on_frame: Callable[[int, Struct], None]) -> None:
        self.name = name
        self._on_frame = on_frame

    def put(self, frame: Struct) -> None:
        """Takes a frame."""
        self._on_frame(self.name, frame)


class Questions:
    """Two ranks, and who of them answers."""

    def __init__(self, answering: set[int], *, step_s: float = 600.0) -> None:
        self.asked: list[int] = []
        self._answering = answering
        peers = [FakePeer(name, self._take) for name in (1, 2)]
        self.watch = Watch(peers, 0, step_s=step_s)

    def _take(self, name: int, frame: Struct) -> None:
        assert isinstance(frame, AskWhere)
        self.asked.append(name)
        if name in self._answering:
            self.watch.answered(name, 4 if name == 2 else 5)


@pytest.mark.trio
async def test_a_short_wait_asks_nobody(autojump_clock: MockClock) -> None:
    """A step costs no frame but its plan."""
    questions = Questions(set())

    async def wait() -> str:
        await anyio.sleep(PATIENCE_S / 2)
        return "done"

    assert await questions.watch.wait_for(wait, 5) == "done"
    assert not questions.asked


@pytest.mark.trio
async def test_a_rank_that_does_not_answer_is_lost(autojump_clock: MockClock) -> None:
    """It hangs as a whole, or its machine has gone without a word."""
    began = anyio.current_time()
    with pytest.raises(
        RankLostError, match="rank 2 is lost: it was asked whether it is there, and has not answered"
    ):
        await Questions({1}).watch.wait_for(anyio.sleep_forever, 5)
    assert anyio.current_time() - began == pytest.approx(PATIENCE_S + ANSWER_S)


@pytest.mark.trio
async def test_ranks_that_answer_are_waited_for(autojump_clock: MockClock) -> None:
    """A long prompt takes its time; the wait is begun again where it was cut short."""
    questions = Questions({1, 2})
    ends = anyio.current_time() + 10 * PATIENCE_S

    async def wait() -> str:
        await anyio.sleep_until(ends)
        return "done"

    assert await questions.watch.wait_for(wait, 5) == "done"
    assert len(questions.asked) >= 16


@pytest.mark.trio
async def test_a_step_has_a_deadline_all_the_same(autojump_clock: MockClock) -> None:
    """A thread may hang while its rank's loop answers: the rank that has run the fewest steps is named."""
    with pytest.raises(RankLostError, match=r"rank 2 hangs: step 5 has not ended on ranks \[2\] in 30 s"):
        await Questions({1, 2}, step_s=30.0).watch.wait_for(anyio.sleep_forever, 5)


@pytest.mark.trio
async def test_who_is_awaited_outside_a_step_has_ten_minutes(autojump_clock: MockClock) -> None:
    """Its loop may be its program's own, and a training step on it may take that long."""
    asked: list[int] = []
    awaited = Awaited()
    watch = watch_of_calls(FakePeer(1, lambda name, _frame: asked.append(name)), 0)
    began = anyio.current_time()

    async def wait_twice_in_vain_and_then_for_ever() -> None:
        async with Supervisor() as supervisor:
            await supervisor.start("watch", partial(awaited.watch, watch))
            await anyio.sleep(1000)
            awaited.set(2)
            await anyio.sleep(5)
            awaited.set(0)
            await anyio.sleep(1000)
            assert not asked, "nothing was awaited, or it came in time"
            awaited.set(1)
            await anyio.sleep_forever()

    with pytest.raises(RankLostError, match="rank 1 is lost"):
        await wait_twice_in_vain_and_then_for_ever()
    assert asked == [1]
    assert anyio.current_time() - began == pytest.approx(2005 + CALL_PATIENCE_S + CALL_ANSWER_S)
