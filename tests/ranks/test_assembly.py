"""Each rank gets the engine of its place: whole, leading, following, or one of several replicas."""

import threading
from collections.abc import Callable

import anyio
import pytest

from megallm.core_async.engine import Engine
from megallm.core_async.kit.foreign import poster
from megallm.core_async.ranks.assembly import Role, assembled
from megallm.core_async.ranks.calls import Calls, FollowerCalls, LeaderCalls, ReplicaCalls
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.ranks.direct import DirectFollower, DirectLeader
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.replica import Replica
from tests.engines import engine_config, fake_runner
from tests.fakes import FakeTokenizer
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import Collective, FakeRanks


@pytest.mark.parametrize(
    ("place", "replica", "is_direct", "expected"),
    [
        (None, None, False, (Engine, Calls, False)),
        (0, None, False, (Engine, LeaderCalls, False)),
        (1, None, False, (Follower, FollowerCalls, True)),
        (None, 0, False, (Coordinator, LeaderCalls, False)),
        (None, 1, False, (Replica, ReplicaCalls, True)),
        (0, 0, False, (Coordinator, LeaderCalls, False)),
        (0, 1, False, (Replica, ReplicaCalls, True)),
        (1, 0, False, (Follower, FollowerCalls, True)),
        (None, None, True, (Engine, Calls, False)),
        (0, None, True, (DirectLeader, LeaderCalls, False)),
        (1, None, True, (DirectFollower, FollowerCalls, True)),
        (1, 1, False, (Follower, FollowerCalls, True)),
    ],
)
def test_a_ranks_place_decides_its_engine(
    place: int | None,
    replica: int | None,
    is_direct: bool,  # noqa: FBT001 - a parameter of the test
    expected: tuple[type[Engine], type[Calls], bool],
) -> None:
    """Only one rank of all takes requests; every other one waits for it at the end."""
    config, collective = engine_config(), Collective()
    role = Role(
        ranks=None if place is None else FakeRanks(place, collective),
        replicas=None if replica is None else FakeRanks(replica, collective),
        is_direct=is_direct,
    )
    engine, calls = assembled(config, fake_runner(config), FakeTokenizer(), role)
    assert (type(engine), type(calls), calls.follows) == expected


class LonelyRanks:
    """`Ranks` of which no other one comes."""

    names = (0, 4)

    def __init__(self, place: int, has_begun: Callable[[], object]) -> None:
        self.place = place
        self.threads: list[threading.Thread] = []
        self.may_end = threading.Event()
        self._has_begun = has_begun

    def exchange(self, record: bytes) -> list[bytes]:
        """Waits."""
        self.threads.append(threading.current_thread())
        self._has_begun()
        self.may_end.wait(10)
        return [record]


@EVERY_LOOP
@pytest.mark.anyio
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", ["ranks", "replicas"])
async def test_a_start_that_is_cancelled_keeps_no_process_from_its_end(kind: str, place: int) -> None:
    """Ctrl-C has to be of use where another rank never comes."""
    config, post, has_begun = engine_config(), poster(), anyio.Event()
    ranks = LonelyRanks(place, lambda: post(has_begun.set))
    role = Role(ranks=ranks) if kind == "ranks" else Role(replicas=ranks)
    engine, _ = assembled(config, fake_runner(config), FakeTokenizer(), role)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        await has_begun.wait()
        tasks.cancel_scope.cancel()
    (thread,) = ranks.threads
    assert thread.is_alive()
    assert thread.daemon
    ranks.may_end.set()
    thread.join()
