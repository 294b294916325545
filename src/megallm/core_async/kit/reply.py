"""One slot for one answer: set once by the answerer, awaited by the asker."""

import anyio

from megallm.core_async.errors import ActorGone


class Reply[R]:
    """The answer to come of one ask. Set or failed once; a second outcome is ignored.

    The asker may be gone (cancelled) by then: setting an answer nobody waits for is no error.
    Lives in one loop; not to be set from another thread.
    """

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._value: R | None = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether the answer, or the error, is there."""
        return self._event.is_set()

    def set(self, value: R) -> None:
        """Gives the answer."""
        if not self._event.is_set():
            self._value = value
            self._event.set()

    def fail(self, error: Exception) -> None:
        """Gives an error in place of the answer; `wait` raises it, so it belongs to this asker alone."""
        if not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> R:
        """Waits for the answer and takes it: to be called once. A cancel leaves the slot as it is.

        Raises: the error that `fail` was given.
        """
        await self._event.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle would keep both, and all they hold
        return self._value  # type: ignore[return-value] - set() stored an R


def gone_error(name: str, cause: BaseException | None) -> ActorGone:
    """Gives an asker's error for an actor that has stopped; `cause` is why, when it failed."""
    gone = ActorGone(f"{name} has stopped" if cause is None else f"{name} failed: {cause!r}")
    gone.__cause__ = cause
    return gone
