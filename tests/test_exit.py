"""Programs that end while an engine runs: their exit code is theirs, and nothing hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

START = """
import json, os, sys, threading, time
sys.path[:0] = {paths!r}
import torch
from megallm.core_async.actors.worker import Worker
from megallm.core_async.errors import LifecycleError
from tests.small_llm import brake, expected, greedy, make_llm, tokens_of
llm = make_llm()
"""

BUSY = """
Worker.stop_deadline_s = 0.1  # which a step on a busy machine may well outlast

def multiply():  # as a step does: C++ that gives the GIL away, and wants it back at its end
    until, square = time.monotonic() + 1.5, torch.ones(400, 400)
    stepping.set()
    while time.monotonic() < until:
        square = (square @ square).clamp(0, 1)

stepping = threading.Event()
brakes = brake()
brakes.__enter__().on_forward = multiply
stream = llm.stream("A", greedy(None))
threading.Thread(target=list, args=(stream,), daemon=True).start()
stepping.wait()
"""

FORK = """
assert tokens_of(llm.generate("A", greedy(4))) == [expected("A", 4)]
child = os.fork()
if child == 0:
    try:
        llm.generate("A", greedy(4))
    except LifecycleError as error:
        print(json.dumps(str(error)), flush=True)
    sys.exit(7)  # an exit as any: what was registered for it is called
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert tokens_of(llm.generate("A", greedy(4))) == [expected("A", 4)]
"""

DROP = """
from megallm.core_async.config import GIB
from tests.small_llm import settings, threads_of_engines

def mapped_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

del llm
config = settings()
config.buffer_size_gb = 1
before = mapped_bytes()
for _ in range(3):
    llm = make_llm(config=config)
    assert tokens_of(llm.generate("A", greedy(4))) == [expected("A", 4)]
    held = mapped_bytes() - before
    del llm
    print(json.dumps([held / GIB, (mapped_bytes() - before) / GIB, threads_of_engines()]), flush=True)
"""


def run(script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program; 60 s at most."""
    source = START.format(paths=[str(ROOT), str(ROOT / "src")]) + script
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_step_that_outlasts_the_program_does_not_abort_it() -> None:
    """The interpreter ends its last threads in a way that C++ answers with `terminate`."""
    done = run(BUSY)
    assert done.returncode == 0, done.stderr
    assert "is left behind" in done.stderr, "the thread was to be busy for longer than the stop waits"


def test_forks_have_no_engine_and_forgotten_engines_no_memory() -> None:
    """A fork's call would wait for ever, and so would its exit.

    Dropped without closing, three times in a row, an engine gives back its cache, its threads and the
    model; the program ends as if nothing had been.
    """
    done = run(FORK + DROP)
    assert done.returncode == 0, done.stderr
    said, *dropped = [json.loads(line) for line in done.stdout.splitlines()]
    assert "is a fork of it; start an engine here, or fork before" in said
    assert len(dropped) == 3
    for held_gib, left_gib, threads in dropped:
        assert held_gib > 0.9
        assert left_gib < 0.5, dropped
        assert threads == []
