"""What is under way in one front end: counted, ended early on request, and waited for at the end.

Knows no web framework and no engine; the server that drains and the routes that answer share one.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import anyio

from megallm.core_async.errors import MegaLLMError


class DrainingError(MegaLLMError):
    """The server is stopping and takes no new request, or ended one to stop in time. Nobody's fault."""

    http_status = 503


class AbortedError(MegaLLMError):
    """An administrator ended the request. The administrator's choice."""

    http_status = 503


class Reading(Protocol):
    """What an exchange reads an engine's output from; an outbox, seen from here."""

    def fail(self, make_error: Callable[[], Exception]) -> None: ...
    def close(self) -> None: ...


class Exchange:
    """One request and its response, from the first byte to the last.

    Whatever reads from the engine for it is closed when it ends, however it ends.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        """As the client gave it, or ours."""
        self.noted: dict[str, Any] = {}  # Any: numbers and texts of a log line
        """What the access log says of it beside method, path and status."""
        self._readings: list[Reading] = []
        self._on_close: list[Callable[[], None]] = []
        self._make_error: Callable[[], Exception] | None = None

    def check(self) -> None:
        """Raises: the error it was cut with."""
        if self._make_error is not None:
            raise self._make_error()

    def reads(self, reading: Reading) -> None:
        """Takes over something that is to be closed at the end.

        Raises: the error it was cut with; what it was given is closed then.
        """
        self._readings.append(reading)
        if self._make_error is not None:
            reading.close()
            raise self._make_error()

    def cut(self, make_error: Callable[[], Exception]) -> None:
        """Ends it: whoever waits for the engine's output gets the error, after what came before."""
        if self._make_error is None:
            self._make_error = make_error
            for reading in self._readings:
                reading.fail(make_error)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls something once when it ends, however it ends."""
        self._on_close.append(callback)

    def close(self, error: Exception | None = None) -> None:
        """Leaves whatever it reads from, which aborts what has not ended. Idempotent.

        `error`: what ended a response whose status was sent before; the log and the trace name its kind.
        """
        if error is not None:
            self.noted["error"] = type(error).__name__
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()
        for reading in self._readings:
            reading.close()
        self._readings.clear()


class Traffic:
    """The exchanges of one front end that are open. Its owner is the front end's loop."""

    def __init__(self) -> None:
        self.is_draining = False
        """Whether new requests are refused."""
        self._open: dict[Exchange, None] = {}
        self._is_idle = anyio.Event()
        self._is_idle.set()

    @property
    def num_open(self) -> int:
        """Responses that are under way."""
        return len(self._open)

    @contextmanager
    def open(self, request_id: str) -> Generator[Exchange]:
        """Counts a request until the block ends, and closes what it has read from."""
        exchange = Exchange(request_id)
        if not self._open:
            self._is_idle = anyio.Event()
        self._open[exchange] = None
        try:
            yield exchange
        finally:
            exchange.close()
            del self._open[exchange]
            if not self._open:
                self._is_idle.set()

    def abort(self, request_id: str | None, *, besides: Exchange | None = None) -> int:
        """Ends the requests of an id, or all, but one that is to go on; gives how many.

        Clients choose ids, so several requests may have one.
        """
        found = [
            exchange
            for exchange in self._open
            if exchange is not besides and request_id in (None, exchange.request_id)
        ]
        for exchange in found:
            exchange.cut(lambda: AbortedError("the request was aborted by an administrator"))
        return len(found)

    def begin_drain(self) -> None:
        """Refuses new requests from now on; those that are open go on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Waits until nothing is open."""
        await self._is_idle.wait()

    def cut(self) -> None:
        """Ends what is open: each stream with one error frame, each other request with an error."""
        self.begin_drain()
        for exchange in self._open:
            exchange.cut(lambda: DrainingError("the server is stopping and ended this request; send it anew"))
