"""vLLM's OpenAI server under the load of `online`, beside which its figures are meant to be read.

The same requests, the same shape, in a process of its own, since either engine takes a GPU's memory for
itself. The weights are vLLM's own random ones (`--load-format dummy`), its settings the defaults but for the
prefix cache and the log line a request, which are off, and as many requests at once as asked for. Its lines
are of suite `online`, to be kept beside those of megallm. Needs a CUDA device and vLLM.
"""

import argparse
import http.client
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.offline_vllm import MAX_LENGTH, MEMORY_SHARE, config_of
from benchmarks.online import CASES, MODEL, VOCAB_SIZE, cases_of, load, table
from benchmarks.online_load import LoadCase
from benchmarks.report import Report, show_progress, significant
from benchmarks.shapes import SHAPES, word_tokenizer
from megallm.models.checkpoint import Hyperparameters

START_LIMIT_S: Final = 400.0
"""Compiling and capturing for an 8B shape takes a minute or two on an H200."""
CHECK_S: Final = 0.1
"""Between two looks at a server that starts: nothing of it says when it listens."""
HEALTH_LIMIT_S: Final = 5.0
END_LIMIT_S: Final = 30.0
TAIL_LINES: Final = 150
"""What the engine's process raised stands above what its server's raised for it."""


class Server(Struct, frozen=True):
    """A server that is not started yet."""

    engine: str
    """What its figures are of."""
    command: list[str]
    port: int
    log: Path
    """What it writes."""
    start_limit_s: float = START_LIMIT_S
    end_limit_s: float = END_LIMIT_S
    """From the request to end until it is killed."""

    def tail(self) -> str:
        """Gives the last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["its log ends with:", *lines[-TAIL_LINES:]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="shape-0.6b", choices=SHAPES, help="random weights (default: %(default)s)")
    add("--cases", type=cases_of, default=CASES, metavar="CASE,...", help="default: %(default)s")
    add("--vocab", type=int, default=VOCAB_SIZE, metavar="N", help="default: %(default)s")
    add("--max-requests", type=int, default=256, metavar="N", help="that run at once (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Serves a model and measures every case."""
    if importlib.util.find_spec("vllm") is None:
        return Report("online", [], [], ["nothing measured: vLLM is not installed"])
    show_progress(f"online_vllm: starting on {options.model}")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), _free_port()
        write_model(folder, replace(SHAPES[options.model], vocab_size=options.vocab))
        server = Server(
            f"vLLM {metadata.version('vllm')}",
            command_of(folder, port, max_requests=options.max_requests),
            port,
            folder / "server.log",
        )
        report = measured(server, options.model, options.cases, options.vocab)
    importlib.import_module("torch")  # the line names the GPUs of a process that loaded it
    return report


def measured(server: Server, model: str, cases: list[LoadCase], vocab_size: int) -> Report:
    """Starts a server, sends it every case twice, ends it, and gives the figures of the second time.

    Raises: RuntimeError when it ends before it is ready, TimeoutError when it is not ready in time, and
    CalledProcessError when a request fails; all with the end of the server's log.
    """
    with _started(server) as ready_s:
        try:
            for state in ("warms up", "is measured"):
                show_progress(f"online_vllm: ready after {ready_s:.1f} s, {state}")
                results = load(server.port, cases, vocab_size)
        except subprocess.CalledProcessError as error:
            error.add_note(server.tail())
            raise
    for row in results:
        row.update(engine=server.engine, shape=model, vocab=vocab_size)
    shown = [table(results, f"{model}, {server.engine}")]
    results.append({"engine": server.engine, "shape": model, "ready_s": significant(ready_s)})
    notes = [f"{server.engine}: ready {ready_s:.1f} s after its process was started"]
    return Report("online", shown, results, notes)


def write_model(folder: Path, shape: Hyperparameters) -> None:
    """Writes what a server reads of a model beside weights: its configuration, and a tokenizer."""
    tokenizer = word_tokenizer(shape.vocab_size).to_json()
    ids: dict[str, int] = json.loads(tokenizer)["model"]["vocab"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": max(ids, key=ids.__getitem__),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (folder / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def command_of(folder: Path, port: int, *, max_requests: int) -> list[str]:
    """Gives the command line that serves a folder as `online_load` asks for it."""
    options: Sequence[tuple[str, object]] = (
        ("--model", folder),
        ("--served-model-name", MODEL),
        ("--host", "127.0.0.1"),
        ("--port", port),
        ("--load-format", "dummy"),
        ("--dtype", "bfloat16"),
        ("--max-model-len", MAX_LENGTH),
        ("--max-num-seqs", max_requests),
        ("--gpu-memory-utilization", MEMORY_SHARE),
    )
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += [str(word) for option in options for word in option]
    return [*words, "--no-enable-prefix-caching", "--no-enable-log-requests", "--disable-uvicorn-access-log"]


@contextmanager
def _started(server: Server) -> Generator[float]:
    """Runs a server; gives how many seconds it took to be ready."""
    began = time.perf_counter()
    with server.log.open("wb") as log:
        # a group, so that all its processes can be ended; no session, so that who ends this one's ends it
        process = subprocess.Popen(  # noqa: S603 - no shell
            server.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        _wait_until_ready(process, server, began + server.start_limit_s)
        yield time.perf_counter() - began
    finally:
        _end(process, server.end_limit_s)


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server, until: float) -> None:
    while not _is_healthy(server.port):
        if time.perf_counter() > until:
            raise TimeoutError(f"the server was not ready in {server.start_limit_s:g} s; {server.tail()}")
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(CHECK_S)  # rather than to sleep: it may die
            raise RuntimeError(f"the server ended with exit code {code} before it was ready; {server.tail()}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HEALTH_LIMIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (ConnectionError, TimeoutError):  # nothing listens yet, or it is still busy
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Asks a server to end, which ends its children, and kills what is left of its group."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    finally:  # an impatient second Ctrl-C must not leave its engine on the GPU either
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
