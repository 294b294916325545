"""A rank that follows: it takes no requests, and ends when the leader does, however that ends."""

import anyio
import pytest

from megallm.core_async.errors import EngineDeadError
from megallm.core_async.plan.phases import Phase
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import running_pair

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_requests_are_refused_with_the_leaders_name() -> None:
    """They would get no output here."""
    async with running_pair() as pair:
        assert pair.follower.phase is Phase.RUNNING
        with pytest.raises(RuntimeError, match="rank 5 follows rank 4, which takes requests"):
            await pair.follower.submit([pair.leading.request([1])])
        with pytest.raises(RuntimeError, match="rank 5 follows rank 4"):
            await pair.follower.queue([pair.leading.request([1])])
        pair.follower.go_on()
        assert pair.follower.phase is Phase.RUNNING


async def test_a_follower_that_leaves_ends_the_leader_too() -> None:
    """A step without it would never end."""
    async with running_pair() as pair:
        await pair.follower.shutdown()
        with pytest.raises(EngineDeadError, match="rank 5 is lost: its connection has ended"):
            await pair.leading.engine.wait_for_shutdown()
        assert pair.follower.phase is Phase.STOPPED


async def test_a_call_in_flight_ends_with_the_leader() -> None:
    """The leader's program may end without making it."""
    errors: list[str] = []
    async with running_pair() as pair, anyio.create_task_group() as tasks:

        async def pause() -> None:
            try:
                await pair.follower_calls.pause()
            except Exception as error:  # noqa: BLE001 - which one it is, is looked at
                errors.append(f"{type(error).__name__}: {error}")

        tasks.start_soon(pause)
        await anyio.wait_all_tasks_blocked()
        await pair.leading.engine.shutdown()
    assert errors == ["EngineStoppedError: the engine was shut down"]


async def test_waiting_for_the_leader_ends_with_it_and_may_be_repeated() -> None:
    """The facade's shutdown is idempotent."""
    async with running_pair() as pair, anyio.create_task_group() as tasks:
        tasks.start_soon(pair.follower.wait_for_leader)
        await pair.leading.engine.shutdown()
    await pair.follower.wait_for_leader()
    await pair.follower.wait_for_shutdown()
