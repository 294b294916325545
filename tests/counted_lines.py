"""How much Python a call runs: for what must not grow with the number of rows or requests."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import megallm
from tests.freed import without_collector

OURS = str(Path(megallm.__file__).parent)

type TraceFunction = Callable[[FrameType, str, Any], Any]  # as sys.settrace has it


def lines_run(call: Callable[[], object]) -> int:
    """Gives how many lines of megallm the call ran.

    No collection starts meanwhile: what earlier tests left would be finalised in the middle of the count.
    """
    num_lines = 0

    def count(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        num_lines += event == "line"
        return count

    tracer = sys.gettrace()
    with without_collector():
        sys.settrace(count)
        try:
            call()
        finally:
            sys.settrace(tracer)
    return num_lines
