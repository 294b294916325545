"""The worker of one rank among several: when it fails, it says which rank is to blame.

A collective fails, or never ends, on every rank when one of them goes, and often before the news of that has
been read. So a failing worker first gives the news a moment to come.
"""

import threading
from collections.abc import Callable
from typing import ClassVar, Final

from megallm.core_async.actors.worker import Worker
from megallm.core_async.errors import RankLostError
from megallm.core_async.messages import WorkerMessage
from megallm.core_async.protocols import Runner

BLAME_S: Final = 1.0
"""How long a failure waits for a better explanation."""
TOLD_BLAME_S: Final = 0.5
"""The same for one that another rank has told of, which is a better explanation than one's own."""


class RankWorker(Worker):
    """The worker of the rank `name`. Its failure is a `RankLostError` that says so, caused by the first."""

    stop_deadline_s: ClassVar[float] = 2.0
    """A thread may wait for a rank that hangs, in a collective that nobody can cancel."""
    exit_deadline_s: ClassVar[float] = 1.0
    """And there it does not ask for the GIL."""

    def __init__(
        self,
        runner: Runner,
        name: int,
        on_failure: Callable[[RankLostError], object],
        *,
        blame_s: float = BLAME_S,
    ) -> None:
        """`on_failure` is called on the worker's thread, before anyone else knows.

        `blame_s`: longer where the news of another rank's failure comes through a third.
        """
        super().__init__(runner)
        self._blame_s = blame_s
        self._name_of_rank = name
        self._on_failure = on_failure
        self.is_explained = threading.Event()
        """Set once somebody else's failure is known: this one is no news."""

    def handle(self, message: WorkerMessage) -> object:
        """See the messages. Raises: RankLostError."""
        try:
            return super().handle(message)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            failure = RankLostError(f"rank {self._name_of_rank} failed: {what}")
            failure.__cause__ = error
            self._on_failure(failure)
            self.is_explained.wait(self._blame_s)
            raise failure from error
