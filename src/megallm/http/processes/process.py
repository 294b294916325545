"""A front end's process: its start, its socket, its end."""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from msgspec import Struct

from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.metrics import DIRECTORY_VARIABLE
from megallm.http.processes.tokenizer_spec import TokenizerSpec
from megallm.http.service import AppSettings

LEAVE_S: Final = 0.5
"""A front end whose socket has closed may take so long to be gone; then it is killed."""
ROOT: Final = Path(__file__).parents[3]
"""The folder that `megallm` is imported from."""


class FrontendSetup(Struct, frozen=True, kw_only=True):
    """What the server tells a front end, once it runs."""

    settings: AppSettings
    tokenizer: TokenizerSpec
    drain_timeout_s: float
    metrics_directory: str

    def packed(self) -> bytes:
        """Gives it as msgpack."""
        return msgspec.msgpack.encode(self)


class FrontendProcess:
    """A running front end. It has the listening socket, and `stream` is the engine's end of its own.

    A front end ends when that socket does: it outlives neither this process nor this object's `end`.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", stream: ByteStream) -> None:
        self._process = process
        self.stream = stream

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def end(self) -> int:
        """Waits a moment for the process to go, kills it if it does not, and gives its exit code.

        Works in cleanup: a cancel does not cut it short.
        """
        with anyio.CancelScope(shield=True):
            try:
                return await to_thread.run_sync(partial(self._process.wait, timeout=LEAVE_S))
            except subprocess.TimeoutExpired:
                self._process.kill()
            return await to_thread.run_sync(self._process.wait)
        raise AssertionError("the scope is never cancelled")


async def start_frontend(listener: socket.socket) -> FrontendProcess:
    """Starts a front end; waits until the process is there, not until it serves."""
    ours, theirs = socket.socketpair()
    copy = listener.dup()  # the server may close its own while the thread works
    try:
        process = await to_thread.run_sync(_spawn, copy.fileno(), theirs.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        copy.close()
    return FrontendProcess(process, ByteStream(ours))


def _spawn(listener: int, engine: int) -> "subprocess.Popen[bytes]":
    """Starts the interpreter on `frontend.py`, which finds megallm where this process did.

    The environment goes along: libraries there read proxies, certificates, OTEL_*, the loader's paths,
    the locale, and nobody can list them all. It shows nothing new, since the process is the same user's.
    Where this program keeps its own figures stays here: front ends have a directory of theirs.
    """
    environment = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(ROOT) if not before else f"{ROOT}{os.pathsep}{before}"
    command = [sys.executable, "-m", "megallm.http.processes.frontend", "--listener", str(listener)]
    return subprocess.Popen(  # noqa: S603 - this interpreter, and our own module
        [*command, "--engine", str(engine)],
        stdin=subprocess.DEVNULL,
        pass_fds=(listener, engine),
        env=environment,
    )
