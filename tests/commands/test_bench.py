"""`megallm bench` runs the benchmarks that stand beside the sources."""

import argparse
from pathlib import Path

import pytest

from megallm.commands import bench

ECHO = """
import json, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps(sys.argv[2:]))
sys.exit(5)
"""


def parse(*argv: str) -> argparse.Namespace:
    """Gives the options of a command line."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_suite_gets_its_arguments_and_gives_the_exit_code(tmp_path: Path) -> None:
    """A failed benchmark must fail the script round it."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__main__.py").write_text(ECHO, encoding="utf-8")
    seen = tmp_path / "seen.json"
    assert bench.run(parse(str(seen), "--model", "x", "--help"), checkout=tmp_path) == 5
    assert seen.read_text(encoding="utf-8") == '["--model", "x", "--help"]'


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    """They are not in the wheel."""
    with pytest.raises(ValueError, match=r"run `make bench` in a checkout"):
        bench.run(parse(), checkout=tmp_path)
