"""An engine whose device work costs nothing, and the clocks that read it from outside.

All of the control plane is real: pump, scheduler, allocator, detokeniser, the worker's thread.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from megallm.core_async.actors.worker import Worker
from megallm.core_async.kit.actor import Address, MailboxAddress
from megallm.core_async.kit.reply import Reply
from megallm.core_async.kit.thread_actor import ThreadAddress
from megallm.core_async.messages import Ask, Ints, LaunchStep, StepPlan, StepResult, WorkerMessage, pack_ints
from megallm.core_async.protocols import Runner


class FreeRunner:
    """A runner that computes nothing: every sampling row's token is id 1."""

    def __init__(self, max_requests: int) -> None:
        self._tokens = pack_ints([1] * max_requests)

    @property
    def runs_at_launch(self) -> bool:
        """Nothing is to run."""
        return True

    def start(self) -> None:
        """Binds nothing."""

    def launch(self, plan: StepPlan) -> "FreeStep":
        """Gives the step's result at once."""
        return FreeStep(StepResult(plan.step, Ints(self._tokens[: 4 * plan.samples.count(1)])))

    def release_cache(self, kept: Ints) -> None:
        """Has no cache to release."""

    def restore_cache(self) -> None:
        """Has no cache to restore."""

    def close(self) -> None:
        """Frees nothing."""


class FreeStep(Struct, frozen=True):
    """A step that has run."""

    outcome: StepResult

    def result(self) -> StepResult:
        """Gives the result."""
        return self.outcome


class OneLetter:
    """A tokenizer that costs nothing: every id is the same letter."""

    vocab_size = 1000

    def tokenize(self, text: str) -> list[int]:
        """Gives an id a letter."""
        return [1] * len(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Gives a letter an id."""
        return "a" * len(tokens)


class Mark(Struct, frozen=True):
    """The clocks at the launch of a step."""

    wall_s: float
    cpu_s: float
    """CPU time of the loop's thread."""
    num_messages: int


class Meter:
    """A worker that marks the clocks as plans are launched, every `window` steps from `first_step` on.

    It sits in the loop, in front of the real worker and its thread; `is_over` is set after
    `num_windows`.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        first_step: int,
        window: int,
        num_windows: int,
        num_messages: Callable[[], int],
    ) -> None:
        self._worker = Worker(runner)
        self._num_messages = num_messages
        self.address: Address[WorkerMessage] = _MeteredAddress(
            self._worker.address, first_step, window, self._mark
        )
        self._num_marks = num_windows + 1
        self.marks: list[Mark] = []
        self.is_over = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Runs the worker."""
        await self._worker.run(task_status=task_status)

    def _mark(self) -> None:
        if len(self.marks) < self._num_marks:
            self.marks.append(Mark(time.perf_counter(), time.thread_time(), self._num_messages()))
        if len(self.marks) == self._num_marks:
            self.is_over.set()


class _MeteredAddress:
    """The worker's address as the pump sees it."""

    def __init__(
        self,
        worker: Address[WorkerMessage],
        first_step: int,
        window: int,
        mark: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._steps = count(-first_step)
        self._window = window
        self._mark = mark

    def tell(self, message: WorkerMessage) -> None:
        self._worker.tell(message)
        if isinstance(message, LaunchStep):
            step = next(self._steps)
            if step >= 0 and step % self._window == 0:
                self._mark()

    def send[R](self, message: Ask[R]) -> Reply[R]:
        return self._worker.send(message)

    async def ask[R](self, message: Ask[R]) -> R:
        return await self.send(message).wait()


@contextmanager
def counted_messages() -> Generator[Callable[[], int]]:
    """Gives what says how many messages actors were sent since: a tell is one, an ask and its reply two.

    Slows every message; not for a run whose times count.
    """
    total = 0
    kinds: tuple[Any, ...] = (MailboxAddress, ThreadAddress)  # Any: their methods are replaced for a while
    kept = [(kind, kind.tell, kind.send) for kind in kinds]

    # Any: whatever the method takes and gives
    def counting(method: Callable[..., Any], num_messages: int) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal total
            total += num_messages
            return method(*args)

        return counted

    for kind, tell, send in kept:
        kind.tell, kind.send = counting(tell, 1), counting(send, 2)
    try:
        yield lambda: total
    finally:
        for kind, tell, send in kept:
            kind.tell, kind.send = tell, send
