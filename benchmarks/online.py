"""The HTTP server under load from this machine: requests and tokens per second, and what each waits for.

A case is `REQUESTS:CONCURRENCY:IN:OUT:s`, streamed, or `:n`, whole. The load comes from a process of its
own (`online_load.py`); every case is sent once to warm up, and once to be measured.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any, Final, cast

from msgspec.structs import replace

from benchmarks.measure import ROOT
from benchmarks.online_load import LoadCase
from benchmarks.report import Cell, Report, Table, significant
from benchmarks.shapes import SHAPES, word_tokenizer

CASES: Final = "16:1:128:128:s,256:32:512:128:s,768:256:512:128:s,768:256:512:128:n,2048:256:16:16:n"
VOCAB_SIZE: Final = 49_152
MODEL: Final = "megallm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="shape-0.6b", choices=SHAPES, help="random weights (default: %(default)s)")
    add("--cases", type=cases_of, default=CASES, metavar="CASE,...", help="default: %(default)s")
    add("--vocab", type=int, default=VOCAB_SIZE, metavar="N", help="default: %(default)s")
    add("--layers", type=int, metavar="N", help="of the model (default: all of its shape)")
    add("--replicas", type=int, default=4, metavar="N", help="front-end processes (default: %(default)s)")
    add("--cache-gb", type=float, default=40.0, metavar="GB", help="the KV cache (default: %(default)s)")
    add("--max-requests", type=int, default=256, metavar="N", help="that run at once (default: %(default)s)")


def cases_of(text: str) -> list[LoadCase]:
    """Gives the cases of a list with commas.

    Raises: ArgumentTypeError naming the one that is wrong.
    """
    try:
        return [LoadCase.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(options: argparse.Namespace) -> Report:
    """Serves a model and measures every case."""
    from benchmarks.shapes import random_model  # noqa: PLC0415 - with torch
    from megallm import InferenceConfig, MegatronLLM  # noqa: PLC0415 - takes seconds
    from megallm.http.serve_config import ServeConfig  # noqa: PLC0415 - with the server's packages

    shape = replace(SHAPES[options.model], vocab_size=options.vocab)
    if options.layers is not None:
        shape = replace(shape, num_layers=options.layers)
    model, _ = random_model(shape)
    cases: list[LoadCase] = options.cases
    config = InferenceConfig(
        buffer_size_gb=options.cache_gb,
        max_requests=options.max_requests,
        max_sequence_length=max(case.prompt_tokens + case.output_tokens for case in cases),
    )
    began = time.perf_counter()
    llm = MegatronLLM(model=model, tokenizer=word_tokenizer(options.vocab), inference_config=config)
    try:
        serving = ServeConfig(host="127.0.0.1", port=0, frontend_replicas=options.replicas, model_name=MODEL)
        server: Any = llm.serve(serving, blocking=False)  # Any: what is given depends on the rank
        ready_s = time.perf_counter() - began
        load(server.port, cases, options.vocab)  # warms up
        results = load(server.port, cases, options.vocab)
    finally:
        llm.shutdown()
    for row in results:
        row.update(engine="megallm", shape=options.model, vocab=options.vocab, replicas=options.replicas)
    notes = [f"ready {ready_s:.1f} s after the model was made"]
    return Report("online", [table(results, options.model)], results, notes)


def load(port: int, cases: list[LoadCase], vocab_size: int) -> list[dict[str, object]]:
    """Gives each case's figures.

    Raises: CalledProcessError when a request fails; what was wrong is on stderr.
    """
    words = [sys.executable, "-m", "benchmarks.online_load", str(port), MODEL, str(vocab_size)]
    words += [case.name for case in cases]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - no shell
    return [_rounded(json.loads(line)) for line in done.stdout.splitlines()]


def _rounded(figures: dict[str, object]) -> dict[str, object]:
    """Gives figures without the digits that are noise."""
    rounded: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            rounded[name] = _rounded(cast("dict[str, object]", value))  # the cast: it is JSON's
        else:
            rounded[name] = significant(value) if isinstance(value, float) else value
    return rounded


def table(results: list[dict[str, object]], shape: str) -> Table:
    """Gives cases' figures as people read them."""
    columns = (
        "case",
        "requests_s",
        "output_tok_s",
        "ttft p50",
        "ttft p99",
        "itl p50",
        "itl p99",
        "whole p50",
    )
    rows: list[tuple[Cell, ...]] = []
    for row in results:
        waits: Any = row  # Any: a row's values are JSON's
        waited = [waits.get(kind, {}).get(rank) for kind in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")]
        rows.append(
            (waits["case"], waits["requests_s"], waits["output_tok_s"], *waited, waits["latency_ms"]["p50"])
        )
    return Table(f"HTTP, {shape}, milliseconds", columns, rows)
