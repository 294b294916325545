"""The command line: `python -m benchmarks SUITE`."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES, main

ROOT = Path(__file__).parents[2]


def test_a_run_ends_with_the_json_line_and_keeps_it(tmp_path: Path) -> None:
    """What `make bench` prints is what is kept and compared."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv = [
        "control_plane",
        "--loops",
        "asyncio",
        "--batches",
        "2",
        "--steps",
        "10",
        "--out",
        f"{tmp_path}/x.jsonl",
    ]
    assert main(argv, stdout, stderr) == 0
    last = stdout.getvalue().splitlines()[-1]
    assert (tmp_path / "x.jsonl").read_text() == last + "\n"
    line = json.loads(last)
    assert list(line) == ["suite", "machine", "results"]
    assert line["suite"] == "control_plane"
    assert [(row["loop"], row["batch"]) for row in line["results"]] == [("asyncio", 2)]


@pytest.mark.parametrize("suite", SUITES)
def test_help_of_a_suite_lists_its_options(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option nobody finds is not there."""
    with pytest.raises(SystemExit, match="0"):
        main([suite, "--help"], io.StringIO(), io.StringIO())
    shown = capsys.readouterr().out
    assert SUITES[suite].split()[-1] in shown
    assert "--out FILE" in shown


def test_help_loads_no_torch() -> None:
    """Whoever asks for the list of suites waits for none of them."""
    code = "import sys; sys.argv[1:] = ['--help']; import runpy\ntry:\n runpy.run_module('benchmarks')\n"
    code += "except SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_suite_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the suites there are."""
    with pytest.raises(SystemExit, match="2"):
        main(["speed"], io.StringIO(), io.StringIO())
    said = capsys.readouterr().err
    assert all(suite in said for suite in SUITES)
