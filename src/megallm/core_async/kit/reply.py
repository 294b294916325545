"""One slot for one answer: set once by the answerer, awaited by the asker."""

import anyio


class Reply[R]:
    """The answer to come of one ask. Set or failed once; a second outcome is ignored.

    The asker may be gone (cancelled) by then: setting an answer nobody waits for is no error.
    Lives in one loop; not to be set from another thread.
    """

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._value: R | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the answer, or the error, is there."""
        return self._event.is_set()

    def set(self, value: R) -> None:
        """Gives the answer."""
        if not self._event.is_set():
            self._value = value
            self._event.set()

    def fail(self, error: BaseException) -> None:
        """Gives an error in place of the answer; `wait` raises it."""
        if not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> R:
        """Waits for the answer. A cancel leaves the slot as it is.

        Raises: the error that `fail` was given.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value] - set() stored an R
