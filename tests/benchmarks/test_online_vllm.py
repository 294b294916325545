"""The peer's server suite on a server that stands in for it: starting, failing to, figures, and the end."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import online_vllm
from benchmarks.online import MODEL
from benchmarks.online_load import LoadCase
from benchmarks.online_vllm import Server, command_of, measured, write_model
from benchmarks.shapes import SHAPES, word_tokenizer

STAND_IN = '''
import json, os, signal, socket, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log_message = lambda self, *words: None

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["max_tokens"]
        line = f"asked {asked['model']} {len(asked['prompt'])} {count}\\n"
        os.write(1, line.encode())  # at once: two requests write beside each other
        self.send_response(400 if count == 13 else 200)
        if asked["stream"]:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in [b"data: {}\\n\\n"] * count + [b"data: [DONE]\\n\\n"]:
                self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
            self.wfile.write(b"0\\r\\n\\r\\n")
            return
        body = json.dumps({"usage": {"completion_tokens": count}}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

_, port, watcher, *traits = sys.argv
if "deaf" in traits:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "dies" in traits:
    sys.exit("no device here")
if "never" in traits:
    signal.pause()
# a process of its own that outlives it, as an engine's would: deaf, and seen by its connection
child = """import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
seen = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
seen.send(b"lives")
signal.pause()"""
subprocess.Popen([sys.executable, "-c", child, watcher])
ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
'''
CASES = [LoadCase.parse("2:1:4:3:s"), LoadCase.parse("3:2:5:6:n")]


@pytest.fixture
def watcher() -> Iterator[socket.socket]:
    """Gives what the stand-in's child connects to for as long as it lives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


def stand_in(folder: Path, watcher: socket.socket, *traits: str, start_limit_s: float = 15) -> Server:
    """Gives a server that answers as the peer does, or has traits."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", STAND_IN, str(port), str(watcher.getsockname()[1]), *traits]
    return Server("vLLM 1.2.3", words, port, folder / "log", start_limit_s=start_limit_s, end_limit_s=0.2)


def wait_for_end_of_child(watcher: socket.socket) -> None:
    """Returns when the child's connection was closed, which its death alone does."""
    connection, _ = watcher.accept()
    with connection:
        connection.settimeout(10)
        while connection.recv(16):
            pass


def test_every_case_is_sent_twice_and_the_second_time_is_given(
    tmp_path: Path, watcher: socket.socket
) -> None:
    """The first captures and compiles; lines look like those of megallm beside them."""
    server = stand_in(tmp_path, watcher)
    report = measured(server, "shape-0.6b", CASES, 300)
    assert server.log.read_text().splitlines() == (["asked megallm 4 3"] * 2 + ["asked megallm 5 6"] * 3) * 2
    streamed, whole, ready = report.results
    assert report.suite == "online"
    assert [(row["engine"], row["shape"], row["case"]) for row in (streamed, whole)] == [
        ("vLLM 1.2.3", "shape-0.6b", "2:1:4:3:s"),
        ("vLLM 1.2.3", "shape-0.6b", "3:2:5:6:n"),
    ]
    assert streamed["num_events"] == 6
    assert "ttft_ms" not in whole
    assert 0 < float(str(ready["ready_s"])) < 15
    assert [row[0] for row in report.tables[0].rows] == ["2:1:4:3:s", "3:2:5:6:n"]


@pytest.mark.parametrize("traits", [(), ("deaf",)])
def test_nothing_of_the_server_outlives_its_measurement(
    tmp_path: Path, watcher: socket.socket, traits: tuple[str, ...]
) -> None:
    """An engine's process that stays keeps the GPU's memory from the next run."""
    measured(stand_in(tmp_path, watcher, *traits), "shape-0.6b", CASES[:1], 300)
    wait_for_end_of_child(watcher)


def test_a_server_that_dies_at_its_start_says_why_at_once(tmp_path: Path, watcher: socket.socket) -> None:
    """The time of a lent machine is short, and the log is in a folder that goes."""
    with pytest.raises(RuntimeError, match="exit code 1 before it was ready; its log ends with:\nno device"):
        measured(stand_in(tmp_path, watcher, "dies"), "shape-0.6b", CASES, 300)


def test_a_server_that_is_never_ready_is_given_up_and_killed(tmp_path: Path, watcher: socket.socket) -> None:
    """A deaf one too; the test would not end with it still there."""
    with pytest.raises(TimeoutError, match=r"not ready in 0\.3 s"):
        measured(stand_in(tmp_path, watcher, "deaf", "never", start_limit_s=0.3), "shape-0.6b", CASES, 300)


def test_a_request_that_fails_brings_the_servers_log_and_its_end(
    tmp_path: Path, watcher: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer says what was wrong with the request, the log what was wrong with the server."""
    with pytest.raises(subprocess.CalledProcessError) as failure:
        measured(stand_in(tmp_path, watcher), "shape-0.6b", [LoadCase.parse("1:1:4:13:n")], 300)
    assert failure.value.__notes__ == ["its log ends with:\nasked megallm 4 13"]
    assert "the server answered b'http/1.1 400" in capfd.readouterr().err
    wait_for_end_of_child(watcher)


def test_the_folder_holds_a_tokenizer_that_others_read_alike(tmp_path: Path) -> None:
    """Text costs the peer's server what it costs that of megallm."""
    auto: Any = import_module("transformers").AutoTokenizer  # Any: it is untyped
    write_model(tmp_path, replace(SHAPES["shape-0.6b"], vocab_size=300))
    read = auto.from_pretrained(tmp_path)
    own = word_tokenizer(300)
    ids = own.tokenize("some words")
    assert read.encode("some words") == ids
    assert read.decode(ids) == own.detokenize(ids) == "some words"
    assert (read.is_fast, read.eos_token_id, len(read)) == (True, 299, 300)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300


def test_the_command_serves_the_model_that_the_load_asks_for(tmp_path: Path) -> None:
    """With no prefix cache, which would shorten the second time a case is sent."""
    words = command_of(tmp_path, 8123, max_requests=7)
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = set(pairwise(words))
    wanted = {("--model", str(tmp_path)), ("--served-model-name", MODEL), ("--port", "8123")}
    assert wanted | {("--max-num-seqs", "7")} <= pairs
    assert "--no-enable-prefix-caching" in words


def test_without_the_peer_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback, and no figures."""
    parser = argparse.ArgumentParser()
    online_vllm.add_arguments(parser)
    report = online_vllm.run(parser.parse_args([]))
    assert report.results == []
    assert report.notes == ["nothing measured: vLLM is not installed"]
    assert not capsys.readouterr().err
