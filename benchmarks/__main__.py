"""`python -m benchmarks SUITE`: measures, shows tables, and ends with one JSON line.

`python -m benchmarks SUITE --help` lists a suite's options. Progress and warnings go to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, TextIO, cast

from benchmarks.measure import busy_warning, machine
from benchmarks.report import Report, show

SUITES: Final = {
    "block_pool": "what a block costs the block pool, and a scheduler's step its prefix cache",
    "control_plane": "the engine's own work a step, with a runner that costs nothing",
    "http": "streams and requests over HTTP, with a model that costs nothing: CPU a token, and latencies",
    "kernels": "attention kernels on a GPU, against the bytes that they read and the products that they make",
    "numerics": "log-probs beside a plain forward pass of the same module, and greedy tokens",
    "offline": "tokens per second of whole batches, beside transformers on the same weights",
    "offline_vllm": "vLLM on the same cases, in a process of its own",
    "online": "the HTTP server under load: tokens per second, and what a request waits for",
    "online_vllm": "vLLM's server under the same load, in a process of its own",
    "prefix": "many questions behind one long system prompt, without and with prefix caching",
    "simulate": "a service of many replicas on a virtual clock, its schedulers and router the real ones",
    "sleep": "memory given back by suspend and left behind by cycles and requests, on a GPU",
}
"""Every suite: a module of this package, and what it measures."""

EXIT_OK = 0


class Suite(Protocol):
    """What a suite's module holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the suite's options."""
        ...

    def run(self, options: argparse.Namespace) -> Report:
        """Measures."""
        ...


def main(argv: Sequence[str], stdout: TextIO, stderr: TextIO) -> int:
    """Runs one suite; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, summary in SUITES.items():
        suite = suites.add_parser(name, help=summary, description=f"Measures {summary}.")
        suite.add_argument("--out", type=Path, metavar="FILE", help="append the JSON line to FILE as well")
        if argv and argv[0] == name:  # the others are not imported: some load torch
            _suite(name).add_arguments(suite)
    options = parser.parse_args(argv)
    if (warning := busy_warning()) is not None:
        print(f"warning: {warning}", file=stderr)
    facts = machine()
    report = _suite(options.suite).run(options)
    show(report, {**facts, "gpus": machine()["gpus"]}, stdout=stdout, out=options.out)
    return EXIT_OK


def _suite(name: str) -> Suite:
    return cast("Suite", import_module(f"benchmarks.{name}"))  # a module found by name has no type


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout, sys.stderr))
