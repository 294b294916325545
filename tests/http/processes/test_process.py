"""A front end's process: small, without a model's libraries, and gone when its socket is."""

import os
import signal
import socket
from pathlib import Path

import anyio
import pytest

from megallm.http.processes.process import start_frontend

pytestmark = pytest.mark.anyio


def is_running(pid: int) -> bool:
    """Whether a process is there; one that has ended and was waited for is not."""
    return Path(f"/proc/{pid}").exists()


async def test_a_process_that_nobody_talks_to_ends_by_itself() -> None:
    """It was started, and its engine was gone before the first word: nothing stays behind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = await start_frontend(listener)
        assert is_running(process.pid)
        process.stream.end()
        while await process.stream.receive():
            pass
        assert await process.end() == 1
        assert not is_running(process.pid)
        process.stream.close()


async def test_one_that_does_not_go_is_killed() -> None:
    """A stopped process, or one that hangs, holds the port and the memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = await start_frontend(listener)
        os.kill(process.pid, signal.SIGSTOP)
        process.stream.close()
        with anyio.CancelScope() as scope:
            scope.cancel()
            assert await process.end() == -signal.SIGKILL
        assert not is_running(process.pid)
