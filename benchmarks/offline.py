"""Whole batches at once, megallm beside transformers' `generate`, same weights, same run.

A case `B:I:O` is B prompts of I random ids that come at once, O tokens each; no output ends early.
Every engine runs a case once to warm up; then they take turns, and medians over the turns are shown,
so that what else the machine does hits all alike. `output_tok_s` counts the whole call, prefill
included; `prompt_tok_s` is up to the last prompt's first token. `step_ms` is the median step:
`total` from one step's tokens to the next's where a case has decode steps, and megallm's parts of it,
of which `plan` and `post` run beside another step's `forward`.
`--batch-invariant` adds the engine that keeps log-probs the same to the bit, and what it costs.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from benchmarks.load import NAMED, Case
from benchmarks.measure import alternate, num_cores
from benchmarks.report import Cell, Report, Table, show_progress, significant
from benchmarks.shapes import SHAPES, random_model

if TYPE_CHECKING:
    from benchmarks.offline_engines import Engine, Timing

ENGINES: Final = ("megallm", "transformers")
INVARIANT: Final = "megallm, batch_invariant"
RATIOS: Final = "megallm / transformers"
COST: Final = "What batch_invariant=True costs: its time / the default's"
PARTS: Final = ("total", "plan", "prepare", "forward", "sample", "post")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        help=f"a known name, a path, or random weights: {', '.join(SHAPES)} (default: %(default)s)",
    )
    add(
        "--cases",
        type=cases_of,
        default="1:128:64,8:128:64,32:128:64,prefill",
        metavar="CASE,...",
        help=f"PROMPTS:IN:OUT or {', '.join(NAMED)} (default: %(default)s)",
    )
    add(
        "--engines",
        type=engines_of,
        default=",".join(ENGINES),
        metavar="NAME,...",
        help="default: %(default)s",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="run megallm with batch_invariant=True as well, and show what it costs",
    )
    add("--threads", type=int, default=num_cores(), metavar="N", help="CPU threads (default: %(default)s)")
    add("--repetitions", type=int, default=3, metavar="N", help="turns of each engine (default: %(default)s)")
    add("--cache-gb", type=float, default=1.0, metavar="GB", help="megallm's KV cache (default: %(default)s)")


def cases_of(text: str) -> list[Case]:
    """Gives the cases of a list with commas.

    Raises: ArgumentTypeError naming the one that is wrong.
    """
    try:
        return [Case.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def engines_of(text: str) -> list[str]:
    """Gives the engines of a list with commas.

    Raises: ArgumentTypeError naming the one that is wrong.
    """
    names = text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")
    return names


def run(options: argparse.Namespace) -> Report:
    """Measures every case on every engine."""
    notes: list[str] = []
    names: list[str] = options.engines
    if "transformers" in names and importlib.util.find_spec("transformers") is None:
        notes.append("megallm alone: transformers is not installed (pip install 'megallm[hf]')")
        names = [name for name in names if name != "transformers"]
    if "transformers" in names and options.model in SHAPES:
        notes.append("megallm alone: random weights have no file that transformers could read")
        names = [name for name in names if name != "transformers"]
    if options.batch_invariant:
        names = [*names, INVARIANT]
    cases: list[Case] = options.cases
    measured: dict[Case, dict[str, list[Timing]]] = {}
    with ExitStack() as stack:
        engines = _open(names, options, stack)
        for case in cases:
            show_progress(f"offline: {case.name}, {options.repetitions} turns of {', '.join(names)}")
            runs = {name: partial(engine.run, case) for name, engine in engines.items()}
            alternate(runs, 1)  # warms up
            measured[case] = alternate(runs, options.repetitions)
    shape = Path(options.model).stem if Path(options.model).exists() else options.model
    results = [
        {
            "engine": name,
            "shape": shape,
            "case": case.name,
            **_figures(case, timings),
            "threads": options.threads,
        }
        for case, by_engine in measured.items()
        for name, timings in by_engine.items()
    ]
    tables = [_speeds(results, f"{shape}, {options.threads} threads"), _steps(results)]
    if set(ENGINES) <= set(names):
        tables.append(_ratios(RATIOS, measured, "megallm", "transformers"))
    if {"megallm", INVARIANT} <= set(names):
        tables.append(_ratios(COST, measured, "megallm", INVARIANT))
    return Report("offline", tables, results, notes)


def _open(names: Iterable[str], options: argparse.Namespace, stack: ExitStack) -> "dict[str, Engine]":
    """Starts the engines, each on weights of its own; `stack` closes them."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    from benchmarks.offline_engines import Megallm, Transformers  # noqa: PLC0415 - with torch
    from megallm import load_model  # noqa: PLC0415 - with torch
    from megallm.models.load import find_file, open_checkpoint  # noqa: PLC0415 - with torch

    torch.set_num_threads(options.threads)
    load = random_model if options.model in SHAPES else load_model
    model, tokenizer = load(options.model)
    engines: dict[str, Engine] = {}
    for name in names:
        if engines and name == INVARIANT:
            model, tokenizer = load(options.model)  # an engine has its model to itself
        if name != "transformers":
            engine = Megallm(
                model, tokenizer, options.cases, options.cache_gb, batch_invariant=name == INVARIANT
            )
        else:
            weight = next(model.parameters())
            checkpoint = open_checkpoint(find_file(options.model))
            engine = Transformers(checkpoint, dtype=weight.dtype, device=weight.device)
        engines[name] = stack.enter_context(closing(engine))
    return engines


# ---- what is shown -----------------------------------------------------------------------------


def _figures(case: Case, timings: "Sequence[Timing]") -> dict[str, object]:
    """Gives an engine's medians over its turns."""
    parts = [part for part in PARTS if part in timings[0].step_ms]
    return {
        "output_tok_s": significant(case.num_output_tokens / _median_wall_s(timings)),
        "prompt_tok_s": significant(case.num_prompt_tokens / _median_prompt_s(timings)),
        "step_ms": {
            part: significant(statistics.median(timing.step_ms[part] for timing in timings)) for part in parts
        },
    }


def _speeds(results: list[dict[str, object]], title: str) -> Table:
    columns = ("case", "engine", "output_tok_s", "prompt_tok_s")
    return Table(f"Tokens per second: {title}", columns, [_cells(row, columns) for row in results])


def _steps(results: list[dict[str, object]]) -> Table:
    rows = [
        (*_cells(row, ("case", "engine")), *_cells(cast("dict[str, object]", row["step_ms"]), PARTS))
        for row in results  # the cast: a row's values are JSON's
    ]
    return Table("Milliseconds of the median step", ("case", "engine", *PARTS), rows)


def _ratios(title: str, measured: "dict[Case, dict[str, list[Timing]]]", engine: str, other: str) -> Table:
    """Gives how many times faster an engine is than another, and the share of tokens on which both agree."""
    columns = ("case", "output", "prompt", "step", "same tokens")
    rows: list[tuple[Cell, ...]] = []
    for case, by_engine in measured.items():
        ours, theirs = by_engine[engine], by_engine[other]
        steps = [
            statistics.median(t.step_ms.get("total", 0.0) for t in timings) for timings in (theirs, ours)
        ]
        rows.append(
            (
                case.name,
                _median_wall_s(theirs) / _median_wall_s(ours),
                _median_prompt_s(theirs) / _median_prompt_s(ours),
                steps[0] / steps[1] if all(steps) else None,
                _agreement(ours[0].token_ids, theirs[0].token_ids),
            )
        )
    return Table(title, columns, rows)


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return f"{sum(one == other for one, other in pairs)}/{len(pairs)}"


def _median_wall_s(timings: "Sequence[Timing]") -> float:
    return statistics.median(timing.wall_s for timing in timings)


def _median_prompt_s(timings: "Sequence[Timing]") -> float:
    return statistics.median(timing.prompt_s for timing in timings)


def _cells(row: dict[str, object], columns: Iterable[str]) -> tuple[Cell, ...]:
    cells = [row.get(column) for column in columns]
    assert all(cell is None or isinstance(cell, str | float) for cell in cells), f"cells are {cells}"
    return tuple(cells)  # type: ignore[return-value] - looked at above
