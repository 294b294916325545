"""Replicas in one process and one loop: real sockets and threads, a fake model on each, and no torch."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from megallm.core_async.config import EngineConfig
from megallm.core_async.plan.phases import Phase
from megallm.core_async.ranks.assembly import Role, assembled
from megallm.core_async.ranks.calls import Calls
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.ranks.replica import Replica
from tests.engines import Rig, engine_config, fake_runner, is_alive
from tests.fakes import FakeRunner, FakeTokenizer
from tests.ranks.in_process import Collective, FakeRanks

NAMES = (0, 4, 6, *range(8, 32, 2))
"""Global ranks: replicas of several ranks each."""


@dataclass
class Fleet:
    """The coordinator and the other replicas, ready."""

    coordinator: Coordinator
    rig: Rig
    """The coordinator's engine, and the fake model of its own replica."""
    others: list[Replica]
    runners: list[FakeRunner]
    """By place."""
    calls: list[Calls]
    """By place."""
    collective: Collective
    """In lockstep: what every step of all replicas waits for."""

    def num_steps(self) -> list[int]:
        """Gives how many steps each replica has run that had rows."""
        return [sum(bool(plan.rows) for plan in runner.plans) for runner in self.runners]


def new_fleet(
    num_replicas: int = 2, *, steps_together: bool = False, config: EngineConfig | None = None
) -> Fleet:
    """Gives replicas that have not started."""
    limits = engine_config() if config is None else config
    collective = Collective(num_replicas)
    runners = [fake_runner(limits) for _ in range(num_replicas)]
    meeting = Collective(num_replicas)
    calls: list[Calls] = []
    others: list[Replica] = []
    coordinator: Coordinator | None = None
    for place, runner in enumerate(runners):
        if steps_together:
            runner.before_launch = collective.wait
        role = Role(replicas=FakeRanks(place, meeting, NAMES[:num_replicas]), shares_experts=steps_together)
        engine, its_calls = assembled(limits, runner, FakeTokenizer(), role)
        calls.append(its_calls)
        if isinstance(engine, Replica):
            others.append(engine)
        else:
            assert isinstance(engine, Coordinator), engine
            coordinator = engine
    assert coordinator is not None
    return Fleet(coordinator, Rig(coordinator, runners[0]), others, runners, calls, collective)


@asynccontextmanager
async def running_fleet(
    num_replicas: int = 2,
    *,
    steps_together: bool = False,
    config: EngineConfig | None = None,
    ends_by_failure: bool = False,
) -> AsyncGenerator[Fleet]:
    """Runs replicas and stops them, which is no failure unless the test has made one."""
    fleet = new_fleet(num_replicas, steps_together=steps_together, config=config)
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as starts:
            for engine in (fleet.coordinator, *fleet.others):
                starts.start_soon(tasks.start, engine.run)
        try:
            yield fleet
        finally:
            with anyio.CancelScope(shield=True):
                await fleet.coordinator.shutdown()
                for calls in fleet.calls[1:]:
                    await calls.wait_for_leader()
    assert not any(is_alive(engine) for engine in fleet.others)
    if not ends_by_failure:
        assert fleet.coordinator.phase is Phase.STOPPED, fleet.coordinator.error()
