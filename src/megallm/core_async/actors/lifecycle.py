"""The lifecycle: owner of the phase. Makes the engine come to rest, give its memory back, and go on."""

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Literal, assert_never

from megallm.core_async.kit.actor import Actor, Address
from megallm.core_async.kit.gate import Gate
from megallm.core_async.kit.reply import Reply
from megallm.core_async.messages import (
    AdmitHeld,
    FinishAll,
    HoldNew,
    Ints,
    ListContents,
    Pause,
    PreemptAll,
    PumpRested,
    Resume,
    Suspend,
    TokenBatch,
    Unpause,
)
from megallm.core_async.plan import phases
from megallm.core_async.plan.phases import Call, Enter, Event, Lifecycle, PauseMode, Phase
from megallm.core_async.protocols import Link

type LifecycleMessage = Pause | Unpause | Suspend | Resume | PumpRested
type KvMode = Literal["persist", "offload", "recompute"]
"""What suspend does with the KV cache: keep it, move it to host memory, or drop it."""


class LifecycleActor(Actor[LifecycleMessage]):
    """Owns the phase and the gate's permission; follows the table of plan/phases.py."""

    name: ClassVar[str] = "lifecycle"
    capacity: ClassVar[int] = 1024
    """Calls of as many tasks and threads at once, and the pump's reports."""

    def __init__(  # everything it moves
        self,
        gate: Gate,
        scheduler: Address[HoldNew | AdmitHeld | PreemptAll | FinishAll | ListContents],
        detokenizer: Address[TokenBatch],
        link: Link,
        kv_mode: KvMode,
        *,
        on_phase: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_phase` is called in each phase that is entered; it never raises."""
        super().__init__()
        self._on_phase = on_phase
        self._gate = gate
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._link = link
        self._kv_mode = kv_mode
        self._table = Lifecycle[Reply[object]]()
        self._awaited_order = 0
        """The order whose rest ends the pause under way."""

    @property
    def phase(self) -> Phase:
        """Where the engine is, as far as it is alive."""
        return self._table.phase

    async def begin(self) -> None:
        """Lets the pump run: every actor has started. Called once, by whoever started them."""
        await self._follow(self._table.report(Event.STARTED))

    async def handle(self, message: LifecycleMessage) -> object:
        """See the messages."""
        match message:
            case Pause(mode):
                steps = self._table.call(self.defer(), Call.PAUSE, PauseMode(mode))
            case Unpause():
                steps = self._table.call(self.defer(), Call.UNPAUSE)
            case Suspend():
                steps = self._table.call(self.defer(), Call.SUSPEND)
            case Resume():
                steps = self._table.call(self.defer(), Call.RESUME)
            case PumpRested(order):
                if self._table.phase is not Phase.PAUSING or order != self._awaited_order:
                    return None
                self._gate.is_allowed = False
                steps = self._table.report(Event.DRAINED)
            case _:
                assert_never(message)
        await self._follow(steps)
        return None

    async def _follow(self, steps: list[phases.Step[Reply[object]]]) -> None:
        """Does what the table says, in order; what ends at once is reported at once."""
        queue = deque(steps)
        while queue:
            step = queue.popleft()
            match step:
                case Enter(phase, mode):
                    self._on_phase()
                    event = await self._enter(phase, mode)
                    if event is not None:
                        queue.extend(self._table.report(event))
                case phases.AbortRequests():
                    self._detokenizer.tell(await self._scheduler.ask(FinishAll("abort")))
                case phases.Reply(caller):
                    caller.set(None)
                case phases.Fail(caller, error):
                    caller.fail(error)
                case _:
                    assert_never(step)

    async def _enter(self, phase: Phase, mode: PauseMode | None) -> Event | None:
        """Does the work of a phase; gives the event that ends it, if it has ended."""
        match phase:
            case Phase.PAUSING:
                if mode is PauseMode.WAIT:
                    await self._scheduler.ask(HoldNew())
                    self._gate.call()
                else:
                    self._gate.forbid()
                self._awaited_order = self._gate.order
                return None
            case Phase.UNPAUSING:
                await self._scheduler.ask(AdmitHeld())
                return Event.RESUMED_WORK
            case Phase.RUNNING:
                self._gate.allow()
                return None
            case Phase.SUSPENDING:
                await self._release_cache()
                return Event.CACHE_RELEASED
            case Phase.RESUMING:
                if self._kv_mode != "persist":
                    await self._link.restore_cache()
                return Event.CACHE_RESTORED
            case _:
                return None

    async def _release_cache(self) -> None:
        if self._kv_mode == "persist":
            return
        kept = Ints(b"")
        if self._kv_mode == "offload":
            kept = await self._scheduler.ask(ListContents())
        else:
            await self._scheduler.ask(PreemptAll())
        await self._link.release_cache(kept)
