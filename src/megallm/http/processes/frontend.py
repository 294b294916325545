"""A front end's process: `python -m megallm.http.processes.frontend`, started by the server with two sockets.

It accepts from the listening socket that all front ends share, and talks to the engine over the
other. It imports neither torch nor megatron-core. It ends when the engine's process does.
"""

import argparse
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from anyio.abc import TaskStatus

from megallm.core_async.errors import EngineDeadError
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.frames import ToFrontend
from megallm.http.app import create_app
from megallm.http.connections.app_server import AppServer, protocol_config
from megallm.http.metrics import Metrics
from megallm.http.processes.process import FrontendSetup
from megallm.http.processes.remote_engine import RemoteEngine, Wire
from megallm.http.processes.tokenizer_spec import build
from megallm.http.tracing import tracing
from megallm.http.traffic import Traffic

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

EXIT_OK: Final = 0
EXIT_ENGINE_ENDED: Final = 1


def main(argv: Sequence[str]) -> int:
    """Serves until the engine's process says to stop, or goes; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megallm.http.processes.frontend", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file descriptor of the listening socket")
    parser.add_argument("--engine", type=int, required=True, help="file descriptor of the engine's socket")
    options = parser.parse_args(argv)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the engine's process drains
    listener, engine = socket.socket(fileno=options.listener), socket.socket(fileno=options.engine)
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(serve, listener, engine, backend="asyncio", backend_options={"use_uvloop": has_uvloop})


async def serve(listener: socket.socket, engine: socket.socket) -> int:
    """Runs one front end on the two sockets; gives the exit code."""
    wire = Wire(ByteStream(engine))
    try:
        welcome, early = await wire.welcome()
    except EngineDeadError:
        return EXIT_ENGINE_ENDED
    setup = msgspec.msgpack.decode(welcome.setup, type=FrontendSetup)
    logging.basicConfig(
        level=logging.INFO if setup.settings.verbose else logging.WARNING,
        format=f"%(levelname)s front end {welcome.owner}: %(message)s",
    )
    tokenizer = TokenizerAdapter(build(setup.tokenizer))
    remote = RemoteEngine(wire, welcome, tokenizer.detokenize)
    has_engine_ended = True
    async with anyio.create_task_group() as tasks:
        async with tracing(is_wanted=setup.settings.is_traced) as tracer:
            server = _app_server(remote, tokenizer, setup, listener, tracer)
            await tasks.start(_drain_on_signal, server, setup.drain_timeout_s)
            tasks.start_soon(_end_with_engine, remote, early, server)
            gc.collect()
            gc.freeze()  # what is there now stays; the collector need not look at it again
            remote.say_ready()
            await server.run()
            has_engine_ended = remote.has_ended.is_set()  # as it has once our own end of the socket is closed
        tasks.cancel_scope.cancel()
    return EXIT_ENGINE_ENDED if has_engine_ended else EXIT_OK


def _app_server(
    remote: RemoteEngine,
    tokenizer: TokenizerAdapter,
    setup: FrontendSetup,
    listener: socket.socket,
    tracer: "Tracer | None",
) -> AppServer:
    traffic = Traffic()
    app = create_app(
        remote,
        tokenizer,
        setup.settings,
        backend="asyncio",
        metrics=Metrics(remote.stats, setup.settings.model_name, Path(setup.metrics_directory)),
        traffic=traffic,
        tracer=tracer,
    )
    server = AppServer(app, listener, protocol_config(setup.settings.bounds.max_header_bytes), traffic)
    remote.on_drain = server.begin_drain
    remote.on_abort = traffic.abort
    return server


async def _drain_on_signal(server: AppServer, timeout_s: float, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            server.begin_drain(timeout_s)


async def _end_with_engine(remote: RemoteEngine, early: Sequence[ToFrontend], server: AppServer) -> None:
    await remote.run(early)
    server.begin_drain(0.0)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)  # no thread that is still at work, on a long text or a grammar, holds the process
