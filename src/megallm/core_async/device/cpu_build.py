"""Compiles the C++ kernels on the machine they run on, once, and loads them.

No header of torch is included and no extension loader used: the sources are plain C++ behind a C interface,
which `g++` builds in three seconds, where torch's headers take 25, and a file built once serves every
version of torch and Python. Knows compilers and the folder of built files; knows no kernel.
"""

import contextlib
import ctypes
import hashlib
import logging
import platform
import subprocess
import tempfile
from pathlib import Path

_logger = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
"""What is tried, in this order; found as the operating system finds programs."""
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
"""`-march=native` is right because the built file's name says which CPU it is for."""
BUILD_TIMEOUT_S = 120.0


def default_cache_dir() -> Path:
    """Gives the folder that built files are kept in."""
    return Path.home() / ".cache" / "megallm"


def load_library(
    source: Path, *, cache_dir: Path | None = None, compiler: str | None = None
) -> ctypes.CDLL | None:
    """Gives the library built from `source`; None, and one line in the log, where it can't be had.

    `source` may include its neighbours. What was built before, from the same sources on the same kind of CPU,
    is taken from `cache_dir`; where that can't be written to, the library is built every time. Several
    processes may build at once: each builds a file of its own, and renames it when it is whole.
    """
    folder = default_cache_dir() if cache_dir is None else cache_dir
    target = folder / f"{source.stem}-{_key_of(source)}.so"
    with contextlib.suppress(
        OSError
    ):  # none yet; or one that needs a library this system has not: build anew
        return ctypes.CDLL(str(target))
    compilers = COMPILERS if compiler is None else (compiler,)
    for name in compilers:
        try:
            with _build_folder(folder) as build:
                return _load_as(target, _built(name, source, Path(build)))
        except FileNotFoundError:
            continue  # no such compiler
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            _logger.info("CPU kernels run in torch, slower: %s can't build them: %s\n%s", name, error, said)
            return None
    _logger.info("CPU kernels run in torch, slower: found no C++ compiler (%s)", ", ".join(compilers))
    return None


def _build_folder(cache_dir: Path) -> tempfile.TemporaryDirectory[str]:
    """Gives a folder to build in, on the cache's file system if it can be written to."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache_dir)
    except OSError:
        return tempfile.TemporaryDirectory()


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


def _load_as(target: Path, library: Path) -> ctypes.CDLL:
    """Moves a built file to its place, if that can be, and loads it; once loaded it may be deleted."""
    with contextlib.suppress(OSError):
        library = library.replace(target)
    return ctypes.CDLL(str(library))


def _key_of(source: Path) -> str:
    """Names everything that the built file depends on."""
    digest = hashlib.sha256()
    for part in (*FLAGS, platform.system(), platform.machine(), _cpu_features(), source.name):
        digest.update(part.encode() + b"\0")
    for path in sorted(source.parent.glob(f"*{source.suffix}")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """Gives the CPU's model and instruction sets, so that a home shared by several machines is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.partition(":")[0].strip() in wanted))
