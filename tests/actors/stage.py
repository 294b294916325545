"""The lifecycle actor among stand-ins for the scheduler, the detokeniser, the ranks and the pump."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar

import anyio
from anyio.abc import TaskGroup

from megallm.core_async.actors.lifecycle import KvMode, LifecycleActor
from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.kit.actor import Actor
from megallm.core_async.kit.gate import Gate
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Ask,
    FinishAll,
    Floats,
    Ints,
    ListContents,
    PumpRested,
    StepPlan,
    StepResult,
    TokenBatch,
    pack_ints,
    unpack_ints,
)

CONTENTS = [3, 4, 9]
"""The blocks that hold something, as the scheduler says."""
KV_MODES: list[KvMode] = ["persist", "offload", "recompute"]


class Peer(Actor[object]):
    """Stands for the scheduler or the detokeniser: writes down what it is told."""

    name: ClassVar[str] = "peer"
    capacity: ClassVar[int] = 64

    def __init__(self, stage: "Stage") -> None:
        super().__init__()
        self._stage = stage

    async def handle(self, message: object) -> object:
        await self._stage.act(type(message).__name__)
        if isinstance(message, FinishAll):
            return TokenBatch([], [], Ints(b""), Floats(b""), [], 0.0)
        return pack_ints(CONTENTS) if isinstance(message, ListContents) else None


class FakeLink:
    """Stands for the ranks."""

    in_flight = 0

    def __init__(self, stage: "Stage") -> None:
        self._stage = stage

    async def launch(self, plan: StepPlan) -> None:
        raise AssertionError(f"the lifecycle launches no step, {plan}")

    async def collect(self) -> StepResult:
        raise AssertionError("the lifecycle collects none")

    async def release_cache(self, kept: Ints) -> None:
        assert kept in (pack_ints(CONTENTS), b""), f"blocks {list(unpack_ints(kept))} are kept"
        await self._stage.act("release, contents " + ("kept" if kept else "lost"))

    async def restore_cache(self) -> None:
        await self._stage.act("restore")


class Stage:
    """The lifecycle among stand-ins, a hand on the pump, and a log of all that was done."""

    def __init__(self, kv_mode: KvMode = "persist") -> None:
        self.log: list[str] = []
        self.gate = Gate()
        self.is_stepping = False
        """Whether the test's pump has a step in flight."""
        self.held_at: str | None = None
        """What is not done before `goes_on` is set; `is_held` says that it has come to that."""
        self.is_held = anyio.Event()
        self.goes_on = anyio.Event()
        self.failure: tuple[str, Exception] | None = None
        """What fails, and how."""
        self.scheduler = Peer(self)
        self.detokenizer = Peer(self)
        self.lifecycle = LifecycleActor(
            self.gate, self.scheduler.address, self.detokenizer.address, FakeLink(self), kv_mode
        )

    async def act(self, what: str) -> None:
        """Writes down what is done; stops or fails there if the test wants it."""
        if what not in ("HoldNew", "AdmitHeld", "TokenBatch"):
            assert not self.is_stepping, f"{what} while a step is in flight"
            assert not self.gate.is_allowed, f"{what} while the pump may plan"
        self.log.append(what)
        await anyio.lowlevel.checkpoint()
        if what == self.held_at:
            self.is_held.set()
            await self.goes_on.wait()
        if self.failure is not None and self.failure[0] == what:
            raise self.failure[1]

    async def ask(self, message: Ask[None], name: str = "") -> None:
        """Makes a call, and writes down what came of it."""
        name = name or type(message).__name__.lower()
        try:
            await self.lifecycle.address.ask(message)
        except (LifecycleError, ActorGone) as error:
            self.log.append(f"{name}: {type(error).__name__}")
        else:
            self.log.append(f"{name}: done")

    def rest(self, order: int | None = None) -> None:
        """Reports that the pump rests, by the gate's last order or an earlier one."""
        self.lifecycle.address.tell(PumpRested(self.gate.order if order is None else order))

    async def begin_ask(self, tasks: TaskGroup, message: Ask[None], name: str = "") -> None:
        """Makes a call in a task, and waits until all that follows from it so far is done."""
        tasks.start_soon(self.ask, message, name)
        await anyio.wait_all_tasks_blocked()

    async def finish(self, message: Ask[None]) -> None:
        """Makes a call, lets the pump rest, and waits for the answer."""
        async with anyio.create_task_group() as tasks:
            await self.begin_ask(tasks, message)
            self.rest()

    def take_log(self) -> list[str]:
        """Gives what was done since it was last asked."""
        log, self.log = self.log, []
        return log


@asynccontextmanager
async def staged(kv_mode: KvMode = "persist") -> AsyncGenerator[Stage]:
    """Runs the actors round a block; the engine is running then."""
    stage = Stage(kv_mode)
    async with Supervisor() as supervisor:
        await supervisor.start("detokenizer", stage.detokenizer.run)
        await supervisor.start("scheduler", stage.scheduler.run)
        await supervisor.start("lifecycle", stage.lifecycle.run)
        await stage.lifecycle.begin()
        yield stage
        await supervisor.stop()
