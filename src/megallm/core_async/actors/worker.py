"""The worker: owner of one rank's runner, on that rank's one thread."""

from collections import deque
from typing import ClassVar, Protocol, assert_never

from anyio.abc import TaskStatus

from megallm.core_async.kit.actor import Address
from megallm.core_async.kit.thread_actor import ThreadActor
from megallm.core_async.messages import (
    CollectStep,
    FollowStep,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    WorkerMessage,
)
from megallm.core_async.protocols import PendingStep, Runner


class WorkerActor(Protocol):
    """The actor round a rank's runner."""

    @property
    def address(self) -> Address[WorkerMessage]: ...

    async def run(self, *, task_status: TaskStatus[None]) -> None: ...


class Worker(ThreadActor[WorkerMessage]):
    """Owns the runner; every call of the runner is made on this actor's thread."""

    name: ClassVar[str] = "worker"
    capacity: ClassVar[int] = 16
    """Two plans in flight, a launch and a collect each, and room for a command."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner
        self._pending: deque[PendingStep] = deque()

    def on_start(self) -> None:
        """Binds the model and allocates the cache."""
        self._runner.start()

    def handle(self, message: WorkerMessage) -> object:
        """See the messages."""
        match message:
            case LaunchStep(plan):
                self._pending.append(self._runner.launch(plan))
                return None
            case CollectStep():
                return self._pending.popleft().result()
            case FollowStep(plan):
                self._pending.append(self._runner.launch(plan))
                while len(self._pending) > 1:  # the device has its next work before its last is waited for
                    self._pending.popleft().result()
                return None
            case ReleaseCache(kept):
                self._runner.release_cache(kept)
                return None
            case RestoreCache():
                self._runner.restore_cache()
                return None
            case _:
                assert_never(message)

    def on_stop(self) -> None:
        """Gives the user's model back as it was."""
        self._pending.clear()
        self._runner.close()
