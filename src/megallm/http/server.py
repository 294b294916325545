"""One HTTP server of an engine: a task of the engine's loop, and what it starts.

With front ends it is their processes that serve; without, the app runs in the loop itself.
"""

import logging
import tempfile
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Literal, cast

import anyio
import sniffio
from anyio import to_thread

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.matchers import Matchers
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.app import create_app
from megallm.http.connections.app_server import AppServer, protocol_config
from megallm.http.metrics import Metrics
from megallm.http.processes.process import FrontendSetup
from megallm.http.processes.replicas import Replicas, first_of
from megallm.http.processes.tokenizer_spec import TokenizerSpec, UnportableTokenizerError, describe
from megallm.http.serve_config import ServeConfig, port_of
from megallm.http.tracing import tracing
from megallm.http.traffic import Traffic

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)


class Server:
    """Owns one server: `run` is its task, in the engine's loop, and all else is called there too."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerAdapter,
        config: ServeConfig,
        matchers: Matchers,
        *,
        ends_with_engine: bool,
    ) -> None:
        """Takes the port; in any thread. `ends_with_engine`: else it answers 503 once the engine has ended.

        `matchers`: the engine's, so that a grammar is compiled once in its process.
        Raises: OSError when the port can't be had.
        """
        self.started: Future[None] = Future()
        """Done once the port answers, failed when it never will."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._settings = config.app_settings()
        self._matchers = matchers
        self._ends_with_engine = ends_with_engine
        self._has_engine_ended = False
        self._listener = config.listen()
        self.port: Final[int] = port_of(self._listener)
        self._stop_after_s: float | None = None
        """What `begin_stop` was called with; None before."""
        self._stop_asked: anyio.Event | None = None
        """While there is something to be drained."""
        self._serving: AppServer | Replicas | None = None

    @property
    def pids(self) -> set[int]:
        """Processes of the front ends that run now."""
        return set(self._serving.pids) if isinstance(self._serving, Replicas) else set()

    def close(self) -> None:
        """Gives the port up, of a server that was never run."""
        self._listener.close()

    async def run(self) -> None:
        """Serves until it is stopped. A cancel cuts every connection at once.

        Raises: EngineDeadError when it ends because the engine failed; FrontendFailedError.
        """
        failure: Exception = EngineStoppedError("the server was stopped before it served")
        try:
            spec = await to_thread.run_sync(self._portable_tokenizer)  # seconds, of a large vocabulary
            if spec is None:
                async with tracing(is_wanted=self._settings.is_traced) as tracer:
                    await self._run_until_drained(self._app_server(tracer))
            else:
                with tempfile.TemporaryDirectory(prefix="megallm-metrics-") as directory:
                    await self._run_until_drained(self._replicas(spec, directory))
        except ExceptionGroup as group:
            failure = first_of(group)
            raise failure from failure.__cause__
        finally:
            self._listener.close()
            if not self.started.done():
                self.started.set_exception(failure)
        if self._ends_with_engine:
            self._raise_if_dead()

    def begin_stop(self, timeout_s: float | None = None) -> None:
        """Stops accepting; what is under way may take so long, or as long as the configuration says.

        Called again, the shorter time holds. `run` has ended two seconds after it at the latest. To be
        called in the loop, though not from a task.
        """
        limit_s = self._config.drain_timeout_s if timeout_s is None else timeout_s
        self._stop_after_s = limit_s if self._stop_after_s is None else min(self._stop_after_s, limit_s)
        if self._stop_asked is not None:
            self._stop_asked.set()

    def end_with_engine(self) -> None:
        """Makes it end once the engine has, instead of answering 503; in the loop, as `begin_stop`."""
        self._ends_with_engine = True
        if self._has_engine_ended:
            self.begin_stop(0.0)

    async def _run_until_drained(self, serving: AppServer | Replicas) -> None:
        self._serving = serving
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch_engine)
            watching.start_soon(self._drain_when_asked, serving)
            async with anyio.create_task_group() as tasks:
                await tasks.start(serving.run)
                if self._stop_after_s is None and not self.started.done():
                    self.started.set_result(None)
            watching.cancel_scope.cancel()

    async def _drain_when_asked(self, serving: AppServer | Replicas) -> None:
        while True:
            self._stop_asked = anyio.Event()
            if self._stop_after_s is not None:
                serving.begin_drain(self._stop_after_s)
            await self._stop_asked.wait()

    async def _watch_engine(self) -> None:
        try:
            await self._engine.wait_for_shutdown()
        except (EngineDeadError, EngineStoppedError) as error:
            log.warning("%s", error)
        self._has_engine_ended = True
        if self._ends_with_engine:
            self.begin_stop(0.0)

    def _raise_if_dead(self) -> None:
        error = self._engine.error()
        if isinstance(error, EngineDeadError):
            raise error from error.__cause__

    # ---- the two ways to serve -----------------------------------------------------------------

    def _portable_tokenizer(self) -> TokenizerSpec | None:
        """Describes the tokenizer for the front ends; None when there are to be none."""
        if not self._config.frontend_replicas:
            return None
        try:
            return describe(self._tokenizer)
        except UnportableTokenizerError as reason:
            log.warning("no front-end processes, since the tokenizer can't go there: %s", reason)
            return None

    def _app_server(self, tracer: "Tracer | None") -> AppServer:
        traffic = Traffic()
        app = create_app(
            self._engine,
            self._tokenizer,
            self._settings,
            backend=cast("Literal['asyncio', 'trio']", sniffio.current_async_library()),
            metrics=Metrics(self._engine.stats, self._settings.model_name, None),
            traffic=traffic,
            matchers=self._matchers,
            tracer=tracer,
        )
        config = protocol_config(self._settings.bounds.max_header_bytes)
        return AppServer(app, self._listener, config, traffic)

    def _replicas(self, spec: TokenizerSpec, directory: str) -> Replicas:
        setup = FrontendSetup(
            settings=self._settings,
            tokenizer=spec,
            drain_timeout_s=self._config.drain_timeout_s,
            metrics_directory=directory,
        )
        num_replicas = self._config.frontend_replicas
        return Replicas(self._engine, self._listener, num_replicas, setup.packed(), self._matchers.check)
