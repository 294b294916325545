"""How a suite's figures are shown: aligned tables for people, one JSON line for everything else.

Knows no suite. The JSON object is the last line of stdout, `{"suite", "machine", "results"}`;
`benchmarks/results/*.jsonl` keeps such lines, one a run.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from msgspec import Struct

type Cell = str | float | None
"""None is shown as a dash."""


class Table(Struct, frozen=True):
    """A table for people."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


class Report(Struct, frozen=True):
    """What one run of a suite gave."""

    suite: str
    tables: list[Table]
    results: list[dict[str, object]]
    """One object a measurement, as the JSON line carries them."""
    notes: list[str] = []
    """What a reader must know beside the tables: an engine left out, and why."""


def show(report: Report, machine: dict[str, object], *, stdout: TextIO, out: Path | None = None) -> None:
    """Writes the tables and, as the last line, the JSON object; appends that line to `out` too."""
    for table in report.tables:
        print(format_table(table), end="\n\n", file=stdout)
    for note in report.notes:
        print(f"note: {note}", file=stdout)
    line = json.dumps({"suite": report.suite, "machine": machine, "results": report.results})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            print(line, file=file)
    print(line, file=stdout)


def show_progress(text: str) -> None:
    """Says on stderr how far a suite is; stdout has what it gives, and nothing else."""
    print(text, file=sys.stderr)


def format_table(table: Table) -> str:
    """Gives the table as lines of equal width: texts to the left, numbers to the right."""
    cells = [[_text(value) for value in row] for row in table.rows]
    is_text = [any(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    widths = [max(map(len, column)) for column in zip(table.columns, *cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in [table.columns, ["-" * width for width in widths], *cells]
    ]
    return "\n".join([table.title, *lines])


def significant(value: float, digits: int = 4) -> float:
    """Gives a measured number without the digits that are noise."""
    return float(f"{value:.{digits}g}")


def _text(value: Cell) -> str:
    match value:
        case None:
            return "-"
        case str():
            return value
        case int():
            return f"{value:,}"
        case _:
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.{_decimals(value)}f}"  # noqa: PLR2004 - four digits


def _decimals(value: float) -> int:
    """Gives how many decimals show three digits or so."""
    bounds: Sequence[tuple[float, int]] = ((100.0, 1), (1.0, 2))
    return next((decimals for bound, decimals in bounds if abs(value) >= bound), 3)
