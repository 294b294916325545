"""The program that a front end's process runs: what it loads, what it says, and when it ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.processes.hub import Peer
from megallm.http.processes.process import FrontendProcess, FrontendSetup, start_frontend
from megallm.http.processes.tokenizer_spec import describe
from megallm.http.service import AppSettings
from tests.engines import Rig, running
from tests.fakes import continuation
from tests.http.loopback import Client, eventually
from tests.http.sites import LONG, greedy
from tests.http.small_tokenizer import small_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

MAX_RESIDENT_KB = 150_000
"""A process with torch in it takes several times as much."""


class FrontEnd:
    """A process, the engine's end of it, and its port."""

    def __init__(self, process: FrontendProcess, peer: Peer, port: int) -> None:
        self.process = process
        self.peer = peer
        self.port = port

    async def stream(self, num_tokens: int) -> Client:
        """Starts a stream; its first event has come."""
        body = msgspec.json.encode(greedy([1], num_tokens) | {"stream": True})
        client = Client.connect(self.port)
        head = f"POST /v1/completions HTTP/1.1\nhost: test\ncontent-length: {len(body)}\n\n"
        await client.send(head.replace("\n", "\r\n").encode() + body)
        await client.read_until(b"data: ")
        return client


def resident_kb(pid: int) -> int:
    """Gives the memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (resident,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(resident)


def environment_of(pid: int) -> list[str]:
    """Gives what a process was started with."""
    return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")


async def started(tasks: TaskGroup, rig: Rig, metrics: Path) -> FrontEnd:
    """Starts a front end of an engine and waits until it answers."""
    setup = FrontendSetup(
        settings=AppSettings(),
        tokenizer=describe(TokenizerAdapter(small_tokenizer())),
        drain_timeout_s=30.0,
        metrics_directory=str(metrics),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = await start_frontend(listener)
        port: int = listener.getsockname()[1]
    peer = Peer(rig.engine, process.stream, setup.packed(), lambda _: None)
    tasks.start_soon(peer.run)
    await peer.ready.wait()
    return FrontEnd(process, peer, port)


async def test_it_serves_without_torch_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Four of them beside the engine must cost neither its memory nor its time to load."""
    async with running(LONG) as rig, anyio.create_task_group() as tasks:
        front_end = await started(tasks, rig, tmp_path)
        assert resident_kb(front_end.process.pid) < MAX_RESIDENT_KB
        client = await front_end.stream(4)
        assert b"[DONE]" in await client.read_until(b"0\r\n\r\n")
        front_end.peer.drain(30.0)
        assert await client.read_to_end() == b""
        assert await front_end.process.end() == 0


async def test_a_program_that_shares_its_own_figures_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is not theirs; the rest of its environment is."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/elsewhere")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    async with running(LONG) as rig, anyio.create_task_group() as tasks:
        front_end = await started(tasks, rig, tmp_path)
        environment = environment_of(front_end.process.pid)
        assert "OTEL_SERVICE_NAME=chat" in environment
        assert "PROMETHEUS_MULTIPROC_DIR=/elsewhere" not in environment
        front_end.peer.drain(0.0)
        assert await front_end.process.end() == 0


async def test_it_ends_with_the_engines_process_and_tells_its_streams(tmp_path: Path) -> None:
    """The user's script was killed: nothing may be left that holds the port, and no client in the dark."""
    async with running(LONG, step_s=0.002) as rig, anyio.create_task_group() as tasks:
        front_end = await started(tasks, rig, tmp_path)
        client = await front_end.stream(4000)
        front_end.process.stream.abort()  # what the kernel does for a process that is killed
        assert b'"error"' in await client.read_to_end()
        assert await front_end.process.end() == 1
        await eventually(lambda: rig.engine.stats().running == 0)


async def test_sigterm_drains_it_and_ctrl_c_is_left_to_the_engines_process(tmp_path: Path) -> None:
    """Both go to the whole group: a request under way is still answered."""
    async with running(LONG, step_s=0.002) as rig, anyio.create_task_group() as tasks:
        front_end = await started(tasks, rig, tmp_path)
        client = await front_end.stream(200)
        os.kill(front_end.process.pid, signal.SIGINT)
        os.kill(front_end.process.pid, signal.SIGTERM)
        assert b"[DONE]" in await client.read_to_end()
        assert await front_end.process.end() == 0
        assert await rig.tokens_of([5]) == continuation([5], 8)


def test_what_it_loads_is_neither_torch_nor_an_extra(anyio_backend: str) -> None:
    """One import too many, somewhere below, and each front end is seconds and gigabytes."""
    heavy = {"torch", "megatron", "transformers", "opentelemetry"}
    code = f"import sys, megallm.http.processes.frontend; print(sorted({heavy} & {{*sys.modules}}))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "[]\n"
