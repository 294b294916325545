"""The lifecycle calls that every rank's program makes: they start together and return together."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from msgspec import Struct

from megallm.core_async.errors import EngineStoppedError, LifecycleError
from megallm.core_async.plan.phases import Phase
from megallm.core_async.ranks.calls import Calls, ReplicaCalls
from megallm.core_async.ranks.together import Gathering
from megallm.core_async.transport.rank_frames import CallEnded
from tests.engines import running
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import Pair, running_pair
from tests.ranks.in_process_replicas import running_fleet

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


class FakeTogether:
    """The other ranks of a replica, which say what a test has them say."""

    def __init__(self) -> None:
        self.calls = Gathering([5])
        self.told: list[Struct] = []

    def to_all(self, frame: Struct) -> None:
        """Takes a frame."""
        self.told.append(frame)


async def together(*calls: Callable[[], Awaitable[None]]) -> list[str]:
    """Makes calls at the same time; gives the errors they raised."""
    errors: list[str] = []

    async def make(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except (LifecycleError, EngineStoppedError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(make, call)
    return errors


def phase(pair: Pair) -> Phase:
    """Gives where the leader's engine is."""
    return pair.leading.engine.phase


async def test_each_call_waits_for_the_other_rank() -> None:
    """A rank that still changes its weights must not see a step."""
    async with running_pair() as pair, anyio.create_task_group() as tasks:
        tasks.start_soon(pair.leader_calls.pause)
        await anyio.wait_all_tasks_blocked()
        assert phase(pair) is Phase.RUNNING
        await pair.follower_calls.pause()
        assert phase(pair) is Phase.PAUSED
        for name, comes in (
            ("suspend", Phase.SUSPENDED),
            ("resume", Phase.PAUSED),
            ("unpause", Phase.RUNNING),
        ):
            assert not await together(getattr(pair.leader_calls, name), getattr(pair.follower_calls, name))
            assert phase(pair) is comes


async def test_a_call_that_fails_fails_on_every_rank_alike() -> None:
    """And the calls after it pair as before."""
    async with running_pair() as pair:
        errors = await together(
            lambda: pair.leader_calls.pause("soon"), lambda: pair.follower_calls.pause("soon")
        )
        assert errors == ['ValueError: mode is \'soon\'; it must be "keep", "wait" or "abort"'] * 2
        errors = await together(pair.leader_calls.pause, pair.follower_calls.unpause)
        assert len(errors) == 2
        assert all(each.startswith("LifecycleError: rank 5 called unpause() where") for each in errors)
        errors = await together(pair.leader_calls.pause, lambda: pair.follower_calls.pause("abort"))
        assert len(errors) == 2
        assert all(each.startswith("LifecycleError: rank 5 called pause('abort') where") for each in errors)
        assert not await together(pair.leader_calls.pause, pair.follower_calls.pause)
        assert phase(pair) is Phase.PAUSED
        assert not await together(
            lambda: pair.leader_calls.set_generation_epoch(3),
            lambda: pair.follower_calls.set_generation_epoch(3),
        )


async def test_a_cancelled_call_of_the_leader_ends_on_the_other_rank() -> None:
    """Which would wait for ever for a call that nobody makes any more."""
    async with running_pair() as pair:
        errors: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.leader_calls.pause)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        errors = await together(pair.follower_calls.pause)
        assert errors == ["LifecycleError: the leader's pause() was cancelled"]


async def test_a_rank_that_shuts_down_makes_no_other_call() -> None:
    """The leader's next call would wait for it for ever."""
    async with running_pair() as pair, anyio.create_task_group() as tasks:
        tasks.start_soon(pair.follower_calls.wait_for_leader)
        for _ in range(2):
            errors = await together(pair.leader_calls.pause)
            assert errors[0].startswith(
                "LifecycleError: rank 5 called shutdown() where this rank called pause()"
            )
        await pair.leading.engine.shutdown()
    assert (await together(pair.leader_calls.pause))[0].startswith("EngineStoppedError")


async def test_calls_of_one_rank_are_the_engines_own() -> None:
    """Nobody is waited for."""
    async with running() as rig:
        calls = Calls(rig.engine)
        await calls.pause()
        await calls.suspend()
        await calls.resume()
        await calls.unpause()
        await calls.set_generation_epoch(2)
        await calls.wait_for_leader()
        assert rig.engine.phase is Phase.RUNNING


async def test_calls_that_differ_within_a_replica_end_everywhere() -> None:
    """The other replicas' programs wait for that replica's call, and must hear why it does not come."""
    async with running_fleet() as fleet:
        other = fleet.calls[1]
        assert isinstance(other, ReplicaCalls)
        followers = FakeTogether()
        other.others.append(followers)
        followers.calls.note(5, 0, "unpause()")
        errors = await together(fleet.calls[0].pause, other.pause)
        assert len(errors) == 2
        assert all("rank 5 called unpause() where this rank called pause()" in error for error in errors)
        assert [type(frame) for frame in followers.told] == [CallEnded]
        other.others.clear()
        assert not await together(fleet.calls[0].pause, other.pause)
