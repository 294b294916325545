"""What a figure needs beside itself: the machine it was taken on, and repetition against noise.

Knows no engine and no suite.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("torch", "triton", "megatron-core", "anyio", "trio", "uvloop", "transformers", "vllm")
"""Whose versions move the figures."""
BUSY_SHARE: Final = 0.25
"""Share of the cores that others may keep busy before a figure is not to be trusted."""


def machine() -> dict[str, object]:
    """Gives what the figures depend on: processor, cores, versions, and the commit they belong to."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "gpus": _gpu_names(),
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def num_cores() -> int:
    """Gives how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def busy_warning() -> str | None:
    """Gives a line for the reader when other processes take the cores; None on a quiet machine.

    The load average is the last minute's, so call it before the work begins.
    """
    load, cores = os.getloadavg()[0], num_cores()
    if load <= BUSY_SHARE * cores:
        return None
    return (
        f"the load average is {load:.1f} on {cores} cores: other processes slow this run, and unevenly;"
        " trust ratios within the run at most, and run it again on a quiet machine"
    )


def alternate[T](runs: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """Runs each in turn, all of them `repetitions` times, so that a slow minute hits all alike."""
    outcomes: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            outcomes[name].append(run())
    return outcomes


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_names() -> list[str]:
    """Gives the GPUs that this process could have used: none where it never loaded torch."""
    torch: Any = sys.modules.get("torch")  # Any: a module looked up by name
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """Gives the checkout's commit, with a plus when files differ from it; None outside of git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    """Gives what a git command says; nothing when it fails or there is no git."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
