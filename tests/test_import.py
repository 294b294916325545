"""`import megallm`: cheap, silent, complete."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import megallm
from megallm.core_async import errors

SOURCE_ROOT = Path(megallm.__file__).parents[1]

HEAVY = ("anyio", "asyncio", "gguf", "megatron", "msgspec", "numpy", "quart", "tokenizers", "torch", "trio")

REPORT = """
import json, signal, sys, threading, time
watched = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
before = {number: signal.getsignal(number) for number in watched}
started = time.process_time()
import megallm
spent_s = time.process_time() - started
if NAMES:
    [getattr(megallm, name) for name in megallm.__all__]
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": [thread.name for thread in threading.enumerate()],
    "changed_signals": [int(number) for number in watched if signal.getsignal(number) is not before[number]],
    "spent_s": spent_s,
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
}))
"""


class Seen(msgspec.Struct):
    """What a fresh interpreter looks like after the import."""

    modules: list[str]
    threads: list[str]
    changed_signals: list[int]
    spent_s: float
    """CPU seconds of the import, so that a busy machine does not count."""
    cuda: bool


def report(*, names: bool) -> Seen:
    """Gives what a fresh interpreter looks like after the import, or after each name was touched too."""
    source = REPORT.replace("NAMES", str(names))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Seen)


def test_the_import_loads_no_heavy_package_and_is_quick() -> None:
    """Every tool that merely imports megallm, `megallm --help` first, would pay seconds for torch."""
    seen = report(names=False)
    assert [name for name in HEAVY if name in seen.modules] == []
    assert seen.spent_s < 0.3


@pytest.mark.parametrize("names", [False, True], ids=["import", "every name"])
def test_importing_starts_no_thread_installs_no_handler_and_touches_no_cuda(names: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """A user's own handlers, fork and choice of device must work after the import, whatever was touched."""
    seen = report(names=names)
    assert seen.threads == ["MainThread"]
    assert seen.changed_signals == []
    assert seen.cuda is False


@pytest.mark.parametrize("name", megallm.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """A name that is listed and can't be imported breaks `from megallm import *` and every reader's trust."""
    assert getattr(megallm, name) is not None
    assert name in dir(megallm)


def test_every_error_a_user_can_meet_is_public() -> None:
    """`except megallm.SomeError` must not need a private import."""
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert raised - set(megallm.__all__) == {"ActorGone"}, "only this one never leaves the engine"


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    """`hasattr` and misspelt imports rely on it."""
    with pytest.raises(AttributeError, match=r"no attribute 'MegatronLM'; it has .*MegatronLLM"):
        _ = megallm.MegatronLM  # pyright: ignore[reportAttributeAccessIssue] - the misspelling is the test
