"""What a step of a model costs, from a measurement of this project: a line of `results/*.jsonl`.

A measured case `ROWS:IN:OUT` gives the time of a step in which so many rows decode, and the rate at
which prompts are computed. Between measured numbers of rows the time is on a straight line, beyond
them on the last one; tokens of prompts come on top. How long the rows' contexts are is not told
apart from how many rows there are: they are as long as those that were measured.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from benchmarks.load import Case


class CostModel(Struct, frozen=True):
    """Seconds of a step, by what it computes."""

    source: str
    """Which measurement it comes from."""
    decode_s: tuple[tuple[int, float], ...]
    """(rows that decode, seconds of the step), by rows."""
    prompt_token_s: float
    """Of a token of a prompt."""

    @classmethod
    def read(cls, path: Path, shape: str) -> Self:
        """Gives the model of the last measurement of a shape in a file of results.

        Raises: ValueError naming the file, the shape, and the shapes that are there.
        """
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        measured = [
            (number, line["machine"], results)
            for number, line in enumerate(lines, 1)
            if (results := _of_shape(line["results"], shape))
        ]
        if not measured:
            known = sorted({each["shape"] for line in lines for each in line["results"] if "shape" in each})
            raise ValueError(f"{path.name} has no cases of {shape!r}; it has {', '.join(known) or 'none'}")
        number, machine, results = measured[-1]
        by_rows = {_rows(each): each["step_ms"]["total"] / 1e3 for each in results}
        rate = max(each["prompt_tok_s"] for each in results)
        device = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}"
        cases = ", ".join(each["case"] for each in results)
        source = f"{path.name}, line {number}: {shape} on {device}, cases {cases}"
        return cls(source, tuple(sorted(by_rows.items())), 1 / rate)

    def table(self, max_rows: int) -> list[float]:
        """Gives the seconds of steps of decode rows alone, by their number; none takes no time."""
        return [self._of_rows(num_rows) for num_rows in range(max_rows + 1)]

    def _of_rows(self, num_rows: int) -> float:
        if not num_rows:
            return 0.0
        points = self.decode_s
        if len(points) == 1 or num_rows <= points[0][0]:
            return points[0][1]
        above = min(bisect_left(points, (num_rows, 0.0)), len(points) - 1)
        (low, low_s), (high, high_s) = points[above - 1], points[above]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)


def _of_shape(results: Sequence[dict[str, Any]], shape: str) -> list[dict[str, Any]]:  # Any: JSON
    """Gives the cases of a shape that tell of one number of rows."""
    return [
        each
        for each in results
        if each.get("shape") == shape and each.get("engine") == "megallm" and ":" in each["case"]
    ]


def _rows(result: dict[str, Any]) -> int:  # Any: JSON
    return Case.parse(result["case"]).num_prompts
