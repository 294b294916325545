"""The kernels' build: made once, found again, safe when two processes make it at once, and never fatal."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megallm.core_async.device.cpu_build import load_library

ANSWER = 'extern "C" int answer() { return NUMBER; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Gives a small source with a neighbour that it includes."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.cpp").write_text("#define NUMBER 42\n")
    main = folder / "answer.cpp"
    main.write_text('#include "number.cpp"\n' + ANSWER)
    return main


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Gives a folder that does not exist yet."""
    return tmp_path / "cache" / "megallm"


def answer_of(library: ctypes.CDLL | None) -> int:
    """Calls the small source's function."""
    assert library is not None
    return library.answer()


def test_a_library_is_built_where_its_file_is_found_again(source: Path, cache_dir: Path) -> None:
    """Only the first start on a machine may wait for a compiler: the second needs none."""
    assert answer_of(load_library(source, cache_dir=cache_dir)) == 42
    assert [path.suffix for path in cache_dir.iterdir()] == [".so"]
    again = load_library(source, cache_dir=cache_dir, compiler=str(cache_dir / "no-such-compiler"))
    assert answer_of(again) == 42


def test_a_change_in_an_included_file_builds_anew(source: Path, cache_dir: Path) -> None:
    """After an update the old kernels must not answer for the new ones."""
    load_library(source, cache_dir=cache_dir)
    (source.parent / "number.cpp").write_text("#define NUMBER 43\n")
    assert answer_of(load_library(source, cache_dir=cache_dir)) == 43


def test_a_built_file_that_can_not_be_loaded_is_built_anew(source: Path, cache_dir: Path) -> None:
    """A disk that was full once must not cost the kernels for good."""
    load_library(source, cache_dir=cache_dir)
    (built,) = cache_dir.iterdir()
    built.unlink()
    built.write_bytes(b"no library")
    assert answer_of(load_library(source, cache_dir=cache_dir)) == 42


def test_without_a_compiler_one_line_is_logged_and_nothing_fails(
    source: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Machines without a compiler run the torch path, and their owner can read why it is slower."""
    caplog.set_level(logging.INFO)
    assert load_library(source, cache_dir=cache_dir, compiler=str(cache_dir / "no-such-compiler")) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no-such-compiler" in record.message


def test_a_failed_build_logs_what_the_compiler_said_and_leaves_nothing(
    source: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that is too old is no reason to refuse service, but its message is worth having."""
    caplog.set_level(logging.INFO)
    source.write_text("#error too old\n")
    assert load_library(source, cache_dir=cache_dir) is None
    (record,) = caplog.records
    assert "#error too old" in record.message
    assert list(cache_dir.iterdir()) == []


def test_a_cache_that_can_not_be_written_is_done_without(source: Path, tmp_path: Path) -> None:
    """In a container the home is often read-only; a file in the folder's place stands for that here."""
    (tmp_path / "file").write_text("")
    assert answer_of(load_library(source, cache_dir=tmp_path / "file" / "cache")) == 42


def test_two_processes_may_build_at_once(source: Path, cache_dir: Path) -> None:
    """Ranks start together, on an empty cache: each must load a whole file."""
    program = (
        "import sys; from pathlib import Path; from megallm.core_async.device.cpu_build import load_library; "
        "sys.stdin.readline(); print(load_library(Path(sys.argv[1]), cache_dir=Path(sys.argv[2])).answer())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(source), str(cache_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in processes] == ["42\n", "42\n"]
    assert [path.suffix for path in cache_dir.iterdir()] == [".so"]
