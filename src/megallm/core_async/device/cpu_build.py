"""Compiles the C++ kernels on the machine they run on, once, and loads them.

No header of torch is included and no extension loader used: the sources are plain C++ behind a C interface,
which `g++` builds in three seconds, where torch's headers take 25, and a file built once serves every
version of torch and Python. Knows compilers and the cache of built files; knows no kernel.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

_logger = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
"""What is tried, in this order; found as the operating system finds programs."""
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast")
"""`-march=native` is right because the file's name carries the CPU it was built on."""
BUILD_TIMEOUT_S = 120.0


def default_cache_dir() -> Path:
    """Gives the folder that built files are kept in."""
    return Path.home() / ".cache" / "megallm"


def load_library(
    source: Path, *, cache_dir: Path | None = None, compiler: str | None = None
) -> ctypes.CDLL | None:
    """Gives the library built from `source`; None, and one line in the log, where it can't be had.

    `source` may include its neighbours. A file built before from the same sources, by the same compiler, on
    the same kind of CPU is taken from `cache_dir`; a folder that can't be written to is done without. Several
    processes may build at once: each builds a file of its own, and renames it when it is whole.
    """
    names = COMPILERS if compiler is None else (compiler,)
    version = next(((name, text) for name in names if (text := _version_of(name)) is not None), None)
    if version is None:
        _logger.info("no C++ compiler (%s): CPU kernels run in torch, slower", ", ".join(names))
        return None
    found, text = version
    folder = default_cache_dir() if cache_dir is None else cache_dir
    target = folder / f"{source.stem}-{_key_of(source, text)}.so"
    try:
        if target.exists():
            return ctypes.CDLL(str(target))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as build:
                return ctypes.CDLL(str(_built(found, source, Path(build)).replace(target)))
        except PermissionError:
            with tempfile.TemporaryDirectory() as build:
                return ctypes.CDLL(str(_built(found, source, Path(build))))
    except (OSError, subprocess.SubprocessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        _logger.info("CPU kernels run in torch, slower: %s can't build them: %s %s", found, error, output)
        return None


def _built(compiler: str, source: Path, folder: Path) -> Path:
    library = folder / "library.so"
    subprocess.run(  # noqa: S603 - a compiler, on our own sources
        (compiler, *FLAGS, str(source), "-o", str(library)),
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    return library


def _version_of(compiler: str) -> str | None:
    """Gives what a compiler says of itself; None if there is none of that name."""
    try:
        answer = subprocess.run(  # noqa: S603 - one of our names, or the caller's
            (compiler, "--version"), check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def _key_of(source: Path, compiler_version: str) -> str:
    """Names everything that the built file depends on."""
    digest = hashlib.sha256()
    for part in (compiler_version, *FLAGS, platform.machine(), _cpu_features(), source.name):
        digest.update(part.encode() + b"\0")
    for path in sorted(source.parent.glob(f"*{source.suffix}")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """Gives the CPU's model and instruction sets, so that a home shared by several machines is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.processor()} {os.uname().version}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.partition(":")[0].strip() in wanted))
