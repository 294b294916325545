"""`megallm bench`: the benchmarks of a checkout, with this interpreter.

They stand beside the package's sources and are not installed with it. Knows where they are, not what
they measure.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import megallm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser; all but the suite's name go to the suite."""
    parser.add_argument("suite", nargs="?", default="control_plane", help="default: %(default)s")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the suite's own; --help lists them")


def run(options: argparse.Namespace, *, checkout: Path | None = None) -> int:
    """Runs a suite and waits for it; gives its exit code.

    Raises: ValueError when there is no checkout round the package.
    """
    root = Path(megallm.__file__).parents[2] if checkout is None else checkout
    if not (root / "benchmarks" / "__main__.py").exists():
        raise ValueError(
            f"there are no benchmarks beside {root}: they come with the source, not with the package; run "
            "`make bench` in a checkout"
        )
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603 - this interpreter and our own module
        [sys.executable, "-P", "-m", "benchmarks", options.suite, *options.arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
