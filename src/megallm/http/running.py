"""A server that runs in an engine's loop, as the program that started it sees it: from any thread."""

import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from functools import partial
from types import FrameType
from typing import Any, Protocol

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError
from megallm.core_async.kit.foreign import wait_for
from megallm.core_async.matchers import Matchers
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.processes.replicas import FrontendFailedError
from megallm.http.serve_config import ServeConfig
from megallm.http.server import Server


def start_server(
    engine: Engine,
    tokenizer: TokenizerAdapter,
    config: ServeConfig,
    matchers: Matchers,
    submit: "Submit",
    *,
    ends_with_engine: bool,
) -> "RunningServer":
    """Starts a server in the loop of an engine; see Server.

    Raises: TypeError; OSError when the port can't be had; EngineStoppedError and EngineDeadError when
    there is no loop to run it.
    """
    if not isinstance(config, ServeConfig):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller may err
        raise TypeError(f"serve() got a {type(config).__name__}; give a megallm.ServeConfig")
    server = Server(engine, tokenizer, config, matchers, ends_with_engine=ends_with_engine)
    return RunningServer(server, engine, submit)


class Submit(Protocol):
    """Starts a call in the engine's loop; cancelling the future cancels it."""

    def __call__[T](self, function: Callable[[], Coroutine[Any, Any, T]], /) -> Future[T]: ...


class RunningServer:
    """One server. `stop` and `wait` block, for programs without a loop; `aclose` and `wait_closed` await."""

    def __init__(self, server: Server, engine: Engine, submit: Submit) -> None:
        """Starts it.

        Raises: EngineStoppedError or EngineDeadError when there is no loop to run it.
        """
        self._server = server
        self._engine = engine
        try:
            self._ended = submit(server.run)
        except BaseException:
            server.close()
            raise

    @property
    def port(self) -> int:
        """The port it answers, the one that was chosen where that was 0."""
        return self._server.port

    @property
    def pids(self) -> set[int]:
        """Process ids of its front ends; none where the engine's own process serves."""
        return self._server.pids

    def wait_started(self) -> None:
        """Blocks until the port answers; its failure to start is raised here."""
        try:
            self._server.started.result()
        except BaseException:
            self._end_now()
            raise

    async def started(self) -> None:
        """Waits until the port answers; its failure to start is raised here. A cancel stops the server."""
        try:
            await wait_for(self._server.started)
        except BaseException:
            self._end_now()
            raise

    def begin_stop(self, timeout_s: float | None = None) -> None:
        """Begins to drain, and waits for nothing; see Server. Called again, the shorter time holds."""
        self._engine.post(partial(self._server.begin_stop, timeout_s))

    def end_with_engine(self) -> None:
        """Makes the server end once the engine has; `wait` raises then what the engine failed of."""
        self._engine.post(self._server.end_with_engine)

    def stop(self, timeout_s: float | None = None) -> None:
        """Drains and stops, and blocks until it has; not in the engine's loop. Idempotent.

        What is under way has `timeout_s`, or as long as the configuration says; the port is free
        two seconds later at the latest. A failure is `wait`'s to raise.
        """
        self.begin_stop(timeout_s)
        wait_for_futures([self._ended])

    def wait(self) -> None:
        """Blocks until it has stopped, whoever stops it.

        Raises: FrontendFailedError; EngineDeadError when the engine's failure ended it.
        """
        with contextlib.suppress(CancelledError):  # the loop has ended, and the server with it
            self._ended.result()

    async def aclose(self, timeout_s: float | None = None) -> None:
        """As `stop`, for programs with a loop. A cancel cuts it short: every connection is cut at once."""
        self.begin_stop(timeout_s)
        with contextlib.suppress(FrontendFailedError, EngineDeadError):  # they are `wait`'s to raise
            await self.wait_closed()

    async def wait_closed(self) -> None:
        """As `wait`, for programs with a loop. A cancel stops the server at once."""
        with contextlib.suppress(CancelledError):
            await wait_for(self._ended)

    @contextlib.contextmanager
    def stopping_on_signals(self, on_first: Callable[[], object] | None = None) -> Generator[None]:
        """Makes SIGINT and SIGTERM drain the server while the block runs; the second one cuts it.

        `on_first` is called with the first one. Does nothing off the main thread, which alone gets signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        num_signals = 0

        def stop(_number: int, _frame: FrameType | None) -> None:
            nonlocal num_signals
            num_signals += 1
            if num_signals == 1 and on_first is not None:
                on_first()
            self.begin_stop(None if num_signals == 1 else 0.0)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_now(self) -> None:
        self._ended.cancel()
