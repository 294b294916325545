"""Each rank gets the engine of its place: whole, leading, following, or one of several replicas."""

import pytest

from megallm.core_async.engine import Engine
from megallm.core_async.ranks.assembly import assembled
from megallm.core_async.ranks.calls import Calls, FollowerCalls, LeaderCalls, ReplicaCalls
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.replica import Replica
from tests.engines import engine_config, fake_runner
from tests.fakes import FakeTokenizer
from tests.ranks.in_process import Collective, FakeRanks


@pytest.mark.parametrize(
    ("place", "replica", "expected"),
    [
        (None, None, (Engine, Calls, False)),
        (0, None, (Engine, LeaderCalls, False)),
        (1, None, (Follower, FollowerCalls, True)),
        (None, 0, (Coordinator, LeaderCalls, False)),
        (None, 1, (Replica, ReplicaCalls, True)),
        (0, 0, (Coordinator, LeaderCalls, False)),
        (0, 1, (Replica, ReplicaCalls, True)),
        (1, 0, (Follower, FollowerCalls, True)),
        (1, 1, (Follower, FollowerCalls, True)),
    ],
)
def test_a_ranks_place_decides_its_engine(
    place: int | None, replica: int | None, expected: tuple[type[Engine], type[Calls], bool]
) -> None:
    """Only one rank of all takes requests; every other one waits for it at the end."""
    config, collective = engine_config(), Collective()
    engine, calls = assembled(
        config,
        fake_runner(config),
        FakeTokenizer(),
        ranks=None if place is None else FakeRanks(place, collective),
        replicas=None if replica is None else FakeRanks(replica, collective),
    )
    assert (type(engine), type(calls), calls.follows) == expected
