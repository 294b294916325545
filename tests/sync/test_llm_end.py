"""How the sync facade ends: interrupted, forgotten, failed. The user's model comes back each time."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.sync.llm import MegatronLLM
from tests.small_llm import (
    brake,
    expected,
    greedy,
    make_llm,
    new_model,
    shared_model,
    sync_llm,
    threads_of_engines,
    tokens_of,
    untouched,
)

ROOT = Path(__file__).parents[2]
ANSWER_S = 5.0


@contextmanager
def ctrl_c(when: threading.Event) -> Generator[list[float]]:
    """Presses Ctrl-C once `when` is set, which the block has to bring about; gives the time when it did."""
    assert not when.is_set(), "it would be pressed before the block begins"
    pressed: list[float] = []

    def press() -> None:
        if when.wait(ANSWER_S):
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield pressed
    finally:
        presser.join()


# ---- Ctrl-C ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("progress", [False, True])
def test_ctrl_c_ends_the_call_at_once_and_leaves_the_engine_usable(loop: str, progress: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Upstream's generates on for nobody, and the next call waits behind it."""
    prompts = [[index] * 20 for index in range(6)]
    with sync_llm(loop=loop) as llm, brake() as braked:
        running = threading.Event()
        braked.on_forward = lambda: running.set() if braked.num_forwards > 3 else None
        with ctrl_c(running) as pressed, pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy(None), progress=progress)
        assert time.monotonic() - pressed[0] < 1.0
        assert tokens_of(llm.generate(prompts, greedy(4))) == [expected(prompt, 4) for prompt in prompts]
        assert braked.num_forwards < 60, "the interrupted requests had 108 tokens to go"


def test_ctrl_c_during_a_long_step_waits_for_no_more_than_a_second() -> None:
    """The forward pass can't be interrupted; the user is not made to wait for it."""
    with sync_llm() as llm, brake() as braked:
        braked.hold(after=1)
        with ctrl_c(braked.is_holding) as pressed, pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", greedy(None))
        assert time.monotonic() - pressed[0] < 1.0
        braked.release()
        assert tokens_of(llm.generate("Hello", greedy(4))) == [expected("Hello", 4)]


def test_ctrl_c_ends_one_threads_call_and_no_others() -> None:
    """The signal belongs to the main thread; worker threads generate on."""
    results: list[list[int]] = []
    with sync_llm() as llm, brake() as braked:
        together = threading.Event()
        braked.on_forward = lambda: together.set() if llm.engine.stats().running == 3 else None
        worker = threading.Thread(
            target=lambda: results.extend(tokens_of(llm.generate(["A", "B"], greedy(100))))
        )
        with ctrl_c(together), pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the worker must not begin before
            worker.start()
            llm.generate("Hello", greedy(None))
        worker.join(ANSWER_S)
    assert results == [expected("A", 100), expected("B", 100)]


def test_ctrl_c_ends_a_stream() -> None:
    """While it waits for a delta; the next call finds all blocks free."""
    with sync_llm() as llm, brake() as braked:
        stream = llm.stream("Hello", greedy(None))
        braked.hold(after=2)
        with ctrl_c(braked.is_holding), pytest.raises(KeyboardInterrupt):
            list(stream)
        braked.release()
        assert list(stream) == []


# ---- forgotten ---------------------------------------------------------------------------------


def test_dropping_it_stops_it_and_says_so() -> None:
    """Three times over: threads, memory and the model come back each time, at once."""
    for _ in range(3):
        with untouched(shared_model()):
            llm = make_llm()
            assert tokens_of(llm.generate("A", greedy(2))) == [expected("A", 2)]
            assert threads_of_engines()
            with pytest.warns(ResourceWarning, match=r"a MegatronLLM was dropped without shutdown\(\)"):
                del llm
            assert threads_of_engines() == []


def test_nothing_keeps_it_alive_after_a_call() -> None:
    """A result, an error or a cycle that held the engine would hold gigabytes."""
    with untouched(shared_model()):
        llm = make_llm()
        results = llm.generate(["A", ""], greedy(2))
        with pytest.raises(ValueError, match="top_p"):
            llm.generate("A", greedy(top_p=5.0))
        stream = llm.stream("A", greedy(20))
        next(stream)
        gc.disable()
        try:
            with pytest.warns(ResourceWarning):
                del llm
            assert threads_of_engines() == []
        finally:
            gc.enable()
        assert len(results) == 2
        with pytest.raises(EngineStoppedError):
            next(stream)


def test_a_closed_one_is_dropped_without_a_word() -> None:
    """Warnings are errors here."""
    with untouched(shared_model()):
        llm = make_llm()
        llm.shutdown()
        del llm


SCRIPT = """
import json, os, signal, sys, threading, time
sys.path[:0] = [{root!r}, {source!r}]
from tests.small_llm import brake, expected, greedy, make_llm, shared_model, tokens_of

def main():
    report = {{}}
    llm = make_llm()
    with brake() as braked:
        def press():
            running.wait()
            report["pressed"] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        running = threading.Event()
        braked.on_forward = lambda: running.set() if braked.num_forwards > 3 else None
        threading.Thread(target=press).start()
        try:
            llm.generate(["A", "B"], greedy(None))
        except KeyboardInterrupt:
            report["took_s"] = time.monotonic() - report.pop("pressed")
    report["answers"] = tokens_of(llm.generate(["A", "B"], greedy(4))) == [expected("A", 4), expected("B", 4)]
    stream = llm.stream("A", greedy(None))
    next(stream)
    print(json.dumps(report), flush=True)
    {end}

main()
"""


def run_script(end: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program of a user's, which ends in its own way; 60 s at most."""
    script = SCRIPT.format(root=str(ROOT), source=str(ROOT / "src"), end=end)
    environment, command = {**os.environ, "OMP_NUM_THREADS": "1"}, [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_a_program_that_never_closes_it_ends_by_itself() -> None:
    """After a Ctrl-C, an answer, and a stream left open: exit code 0, and no hang."""
    done = run_script("global kept; kept = llm, stream")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["took_s"] < 1.0
    assert report["answers"] is True
    assert "Traceback" not in done.stderr


# ---- the engine's loop -------------------------------------------------------------------------


async def double(value: int) -> int:
    """Gives twice the value, after a turn of the loop."""
    await anyio.lowlevel.checkpoint()
    return 2 * value


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_coroutines_run_in_the_engines_loop(loop: str) -> None:
    """`submit` and `run_sync` as upstream; those that come too late are closed."""
    with sync_llm(loop=loop) as llm:
        assert llm.submit(double(4)).result(ANSWER_S) == 8
        assert llm.run_sync(double(5)) == 10
        llm.shutdown()
        for lend in (llm.submit, llm.run_sync):
            with pytest.raises(EngineStoppedError):
                lend(double(4))
    gc.collect()


def test_direct_mode_has_no_loop_to_lend_and_no_lifecycle() -> None:
    """As upstream; and the coroutine that was not run is closed."""
    with sync_llm(use_coordinator=False) as llm:
        for lend in (llm.submit, llm.run_sync):
            with pytest.raises(RuntimeError, match="requires use_coordinator=True"):
                lend(double(4))
        for call in (llm.pause, llm.unpause, llm.suspend, llm.resume):
            with pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) requires use_coordinator=True"):
                call()
        llm.wait_for_shutdown()
    gc.collect()


# ---- failed ------------------------------------------------------------------------------------


def fail_every_way(llm: MegatronLLM) -> list[BaseException]:
    """Makes calls of every kind from several threads, and gives what each raised."""
    errors: list[BaseException] = []

    def generate(index: int) -> None:
        with pytest.raises(EngineDeadError) as dead:
            llm.generate([[index], [index, index]], greedy(100))
        errors.append(dead.value)

    def stream() -> None:
        with pytest.raises(EngineDeadError) as dead:
            list(llm.stream([5], greedy(100)))
        errors.append(dead.value)

    callers = [threading.Thread(target=generate, args=(index,)) for index in range(4)]
    callers += [threading.Thread(target=stream) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(ANSWER_S)
    return errors


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_layer_that_raises_fails_every_call_with_the_cause(loop: str) -> None:
    """Out of memory in a layer: all threads learn of it in a second, and the model comes back unhooked."""
    failure = RuntimeError("out of memory")
    with brake() as braked, sync_llm(loop=loop) as llm:
        raised_at: list[float] = []

        def fail_soon() -> None:
            if braked.num_forwards > 5:
                braked.failure = failure
                raised_at.append(time.monotonic())

        braked.on_forward = fail_soon
        errors = fail_every_way(llm)
        assert time.monotonic() - raised_at[0] < 1.0
        assert len(errors) == 6
        assert {error.__cause__ for error in errors} == {failure}
        with pytest.raises(EngineDeadError, match="RuntimeError: out of memory") as later:
            llm.generate("A", greedy(2))
        assert later.value.__cause__ is failure
        with pytest.raises(EngineDeadError):
            llm.generate([])
        with pytest.raises(EngineDeadError):
            llm.wait_for_shutdown()
        llm.shutdown()
        llm.shutdown()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_start_that_fails_fails_the_construction(loop: str) -> None:
    """With what failed, as it is; and leaves no thread, and the model as it was."""

    def refuse(*_args: object, **_options: object) -> None:
        raise MemoryError("no room")

    model = new_model()
    model.output_layer.register_forward_pre_hook = refuse
    with untouched(model), pytest.raises(MemoryError, match="no room"):
        make_llm(model=model, loop=loop)


# ---- closed ------------------------------------------------------------------------------------


def test_leaving_the_block_by_an_error_closes_and_shows_the_error() -> None:
    """`with` never suppresses."""
    with untouched(shared_model()):
        with pytest.raises(KeyError, match="mine"), make_llm() as llm:
            raise KeyError("mine")
        with pytest.raises(EngineStoppedError, match="the engine was shut down"):
            llm.generate("A")
        with pytest.raises(EngineStoppedError):
            llm.generate([])
        with pytest.raises(EngineStoppedError):
            next(llm.stream("A"))
        llm.shutdown()
        llm.wait_for_shutdown()


def test_shutdown_ends_the_calls_of_other_threads() -> None:
    """Each with the error that says so."""
    errors: list[BaseException] = []
    with sync_llm() as llm, brake() as braked:
        braked.hold(after=2)

        def generate() -> None:
            with pytest.raises(EngineStoppedError) as stopped:
                llm.generate(["A", "B"], greedy(None))
            errors.append(stopped.value)

        callers = [threading.Thread(target=generate) for _ in range(3)]
        for caller in callers:
            caller.start()
        assert braked.is_holding.wait(ANSWER_S)
        threading.Thread(target=braked.release).start()
        llm.shutdown()
        for caller in callers:
            caller.join(ANSWER_S)
    assert len(errors) == 3


def test_one_model_serves_one_engine_after_another() -> None:
    """Scripts that build an engine for each experiment."""
    for loop in ("asyncio", "trio", "asyncio"):
        with sync_llm(loop=loop) as llm:
            assert tokens_of(llm.generate("Hello", greedy(3))) == [expected("Hello", 3)]
