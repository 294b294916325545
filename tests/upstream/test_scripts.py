"""Programs written for megatron-core's high-level API run with only the import changed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeTokenizer
from tests.small_llm import expected
from tests.upstream.scripts import ASYNC, OFFLINE, SERVER

ROOT = Path(__file__).parents[2]

BUILD = """
import sys

sys.path[:0] = {paths!r}


def build():
    from tests.fakes import FakeTokenizer
    from tests.small_llm import new_model

    return new_model(), FakeTokenizer()
"""


def run(script: str) -> list[list[str]]:
    """Runs a program with only the import changed; gives the lines it prints, the first word apart."""
    ours = script.replace("from megatron.core.inference.apis import", "from megallm import")
    assert ours != script
    source = BUILD.format(paths=[str(ROOT), str(ROOT / "src")]) + ours
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert lines[-1] == ["DONE"], done.stdout
    return lines[:-1]


def answers(num_tokens: int) -> list[str]:
    """Gives what the model says to the programs' prompts, as they print it."""
    prompts = ["Hello", "The quick brown fox", "A"]
    return [f"{prompt} {expected(prompt, num_tokens)}" for prompt in prompts]


@pytest.mark.parametrize("script", [OFFLINE, ASYNC], ids=["offline", "async"])
def test_a_program_runs_with_only_the_import_changed(script: str) -> None:
    """Its batches, its round trips with requests in flight, its waiting thread, and its exit code."""
    lines = run(script)
    assert [rest for word, rest in lines if word == "RESULT"] == answers(16)
    late = [rest for word, rest in lines if word == "LATE"]
    assert late == (answers(100) if script is OFFLINE else [])


def test_a_serving_program_runs_with_only_the_import_changed() -> None:
    """Its server answers once `serve(blocking=False)` returns, streams, and shares the program's engine."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    lines = run(f"port = {port}\n{SERVER}")
    text = json.dumps(FakeTokenizer().detokenize(expected("Hello", 16)))
    assert [rest for word, rest in lines if word == "TEXT"] == [text] * 3
