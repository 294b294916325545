"""Two ranks in one process and one loop: real sockets and threads, the fake model on both, and no torch."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from megallm.core_async.engine import Engine
from megallm.core_async.messages import StepPlan
from megallm.core_async.protocols import Runner
from megallm.core_async.ranks.calls import FollowerCalls, LeaderCalls
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.leader import Leader
from megallm.core_async.ranks.together import Together
from tests.engines import Rig, engine_config, fake_runner
from tests.fakes import FakeRunner, FakeTokenizer

NAMES = (4, 5)
"""Global ranks: those of a second replica, so that no test mixes them up with places."""
STUCK_S = 15.0


class Collective:
    """What both ranks' threads wait for together, as for a sum over ranks; broken when a rank goes."""

    def __init__(self, num_ranks: int = len(NAMES)) -> None:
        self._num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._records: dict[int, bytes] = {}

    def wait(self, _plan: StepPlan | None = None) -> None:
        """Waits for the other rank. Raises: BrokenBarrierError once one has gone."""
        self._barrier.wait(STUCK_S)

    def abort(self) -> None:
        """Breaks what any rank waits for, now and later."""
        self._barrier.abort()

    def exchange(self, place: int, record: bytes) -> list[bytes]:
        """Gives every rank's record."""
        self._records[place] = record
        self.wait()
        records = [self._records[each] for each in range(self._num_ranks)]
        self.wait()
        return records


class FakeRanks:
    """`Ranks` of this process."""

    def __init__(self, place: int, collective: Collective, names: tuple[int, ...] = NAMES) -> None:
        self.place = place
        self.names = names
        self._collective = collective

    def exchange(self, record: bytes) -> list[bytes]:
        """See Ranks."""
        return self._collective.exchange(self.place, record)


@dataclass
class Pair:
    """Two ranks that are ready."""

    leading: Rig
    follower: Follower
    follower_runner: FakeRunner
    collective: Collective
    leader_calls: LeaderCalls
    follower_calls: FollowerCalls

    @property
    def leader(self) -> Leader:
        """The leader's worker."""
        (leader,) = self.leader_calls.others
        assert isinstance(leader, Leader), leader
        return leader


def new_pair() -> Pair:
    """Gives two ranks that have not started."""
    config, collective = engine_config(), Collective()
    runners = [fake_runner(config) for _ in NAMES]
    for runner in runners:
        runner.before_launch = collective.wait
    follower = Follower(config, runners[1], FakeTokenizer(), FakeRanks(1, collective))

    def make_leader(runner: Runner) -> Leader:
        leader = Leader(runner, FakeRanks(0, collective), engine.error)
        others.append(leader)
        return leader

    others: list[Together] = []
    engine = Engine(config, runners[0], FakeTokenizer(), make_worker=make_leader)
    leader_calls = LeaderCalls(engine, others)
    return Pair(
        leading=Rig(engine, runners[0]),
        follower=follower,
        follower_runner=runners[1],
        collective=collective,
        leader_calls=leader_calls,
        follower_calls=FollowerCalls(follower),
    )


@asynccontextmanager
async def running_pair() -> AsyncGenerator[Pair]:
    """Runs two ranks and stops them."""
    pair = new_pair()
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as starts:
            starts.start_soon(tasks.start, pair.leading.engine.run)
            starts.start_soon(tasks.start, pair.follower.run)
        try:
            yield pair
        finally:
            with anyio.CancelScope(shield=True):
                await pair.leading.engine.shutdown()
                await pair.follower_calls.wait_for_leader()
