"""Starts the ranks of a test with what torchrun sets, and ends every one of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]


class RankProcess:
    """One rank: its process, and what it prints."""

    def __init__(self, pid: int, output: TextIO) -> None:
        self.pid = pid
        self._output = output

    def wait_for(self, line: str) -> None:
        """Waits until it prints a line."""
        printed: list[str] = []
        for each in self._output:
            if each.strip() == line:
                return
            printed.append(each)
        raise AssertionError(f"it has ended and did not print {line!r}:\n{''.join(printed)}")

    def report(self) -> dict[str, Any]:
        """Waits until it has closed its output, and gives the JSON of the last line."""
        printed = self._output.read()
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        assert lines, f"it has ended and reported nothing:\n{printed}"
        report: dict[str, Any] = json.loads(lines[-1])
        return report

    def send(self, sent: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, sent)


class Ranks:
    """A process that forks ranks; see forking.py."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @contextmanager
    def running(self, module: str, num_ranks: int, *arguments: str) -> Generator[list[RankProcess]]:
        """Runs `python -m module arguments` once for each rank; kills what is left at the end."""
        environment = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        order = {"module": module, "arguments": arguments, "environment": environment}
        with ExitStack() as opened:
            pipes = [os.pipe() for _ in range(num_ranks)]
            outputs = [opened.enter_context(os.fdopen(reading)) for reading, _ in pipes]
            socket.send_fds(self._sock, [json.dumps(order).encode()], [writing for _, writing in pipes])
            for _, writing in pipes:
                os.close(writing)
            pids: list[int] = json.loads(self._sock.recv(65536))
            try:
                yield [RankProcess(pid, output) for pid, output in zip(pids, outputs, strict=True)]
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                self._codes()

    def _codes(self) -> list[int]:
        self._sock.sendall(b"{}")
        codes: list[int] = json.loads(self._sock.recv(65536))
        return codes


@contextmanager
def forking() -> Generator[Ranks]:
    """Runs a process that forks ranks, and ends it."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.ranks.forking", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        with process:
            yield Ranks(ours)
            ours.shutdown(socket.SHUT_RDWR)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
