"""A stream of deltas for blocking readers."""

from typing import Self

from megallm.core_async.host import EngineHost
from megallm.core_async.messages import Delta
from megallm.core_async.streaming import StreamState


class SyncStream:
    """An iterator of `Delta`, for one reader; the last has a `finish_reason`.

    `close`, an error or Ctrl-C while waiting, leaving a `with` block, and garbage collection abort
    the request.
    """

    def __init__(self, state: StreamState, host: EngineHost) -> None:
        self._state = state
        self._host = host

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """Waits for the next delta.

        Raises: StopIteration after the last; EngineBusy, EngineStoppedError, EngineDeadError.
        """
        if self._state.has_ended:
            raise StopIteration
        try:
            delta = self._host.call(self._state.take)
        except BaseException:
            self._state.leave()
            raise
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Aborts the request unless it has ended; its blocks are free by the next step."""
        self._state.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self._state.leave()

    def __del__(self) -> None:
        self._state.leave()
