"""The scheduler: owner of the requests. Says what each step computes and what its result meant."""

from typing import ClassVar, assert_never

import anyio

from megallm.core_async.errors import EngineBusy
from megallm.core_async.kit.actor import Actor, Address, Refusal
from megallm.core_async.kit.gate import Gate
from megallm.core_async.messages import (
    AdmitHeld,
    FinishAll,
    ForgetPrefixes,
    HoldNew,
    ListContents,
    NewRequest,
    NextStep,
    Planned,
    PreemptAll,
    ReserveBlocks,
    SetEpoch,
    StepPlan,
    Submit,
    TokenBatch,
)
from megallm.core_async.plan.flight import Outcome
from megallm.core_async.plan.roster import Roster

type SchedulerMessage = (
    Submit | NextStep | PreemptAll | FinishAll | HoldNew | AdmitHeld | SetEpoch | ListContents
)


class Scheduler(Actor[SchedulerMessage]):
    """Owns the roster; only it mutates it. Asks the allocator once a step, at most."""

    name: ClassVar[str] = "scheduler"
    capacity: ClassVar[int] = 4096
    """Submissions of one turn of the loop, one message each; the engine refuses more as EngineBusy."""

    def __init__(
        self, roster: Roster, allocator: Address[ReserveBlocks | ForgetPrefixes | ListContents], gate: Gate
    ) -> None:
        super().__init__()
        self._roster = roster
        self._allocator = allocator
        self._gate = gate

    async def handle(self, message: SchedulerMessage) -> object:
        """See the messages."""
        match message:
            case NextStep():
                return await self._next_step(message)
            case Submit(requests):
                self._submit(requests)
            case PreemptAll():
                self._roster.preempt_all(anyio.current_time())
                await self._forget_prefixes()
            case FinishAll(finish_reason):
                return await self._finish_all(finish_reason)
            case HoldNew():
                self._roster.hold_new()
            case AdmitHeld():
                self._roster.admit_held()
                self._gate.need()
            case ListContents():
                await self._give_back()
                return await self._allocator.ask(message)
            case SetEpoch(epoch):
                self._roster.mark_epoch(epoch)
                await self._forget_prefixes()
            case _:
                assert_never(message)
        return None

    def _submit(self, requests: list[NewRequest]) -> None:
        try:
            self._roster.submit(requests)
        except EngineBusy as busy:
            raise Refusal(busy) from None
        self._gate.need()

    async def _next_step(self, message: NextStep) -> Planned:
        outcome = Outcome()
        if message.result is not None:
            self._roster.apply(message.result, outcome)
        self._roster.drop(message.closed, outcome)
        self._roster.forget_finished(outcome)
        if message.result is not None and message.result.failed:
            await (
                self._forget_prefixes()
            )  # whoever shared the blocks of a row with broken numbers would fail too
        plan = await self._plan() if message.may_plan else None
        if plan is None:
            await self._give_back()
        has_news = message.result is not None or outcome.finished
        batch = outcome.batch(anyio.current_time()) if has_news else None
        return Planned(plan, batch, self._roster.stats())

    async def _plan(self) -> StepPlan | None:
        choice = self._roster.choose()
        wish = self._roster.wish(choice)
        grant = None
        if wish is not None:
            grant = await self._allocator.ask(wish)
            self._roster.settle(choice, grant, anyio.current_time())
        return self._roster.commit(choice, grant)

    async def _give_back(self) -> None:
        wish = self._roster.give_back()
        if wish is not None:
            self._roster.count(await self._allocator.ask(wish))

    async def _forget_prefixes(self) -> None:
        """Forgets first, so that the counts that come with the reply to the second ask are those of now."""
        await self._allocator.ask(ForgetPrefixes())
        self._roster.count(await self._allocator.ask(self._roster.give_back() or NOTHING))

    async def _finish_all(self, reason: str) -> TokenBatch:
        outcome = self._roster.finish_all(reason)
        await self._give_back()
        return outcome.batch(anyio.current_time())


NOTHING = ReserveBlocks([], [], [], [], [], [], 0)
"""Asks for the counts alone."""
