"""Types of command-line arguments: what argparse turns texts into, with errors that name the range."""

import argparse
import math
from collections.abc import Callable
from typing import Final

DTYPES: Final = ("float32", "bfloat16", "float16")
"""Those that models are loaded in."""


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Gives the argument type of whole numbers from `minimum` up, to `maximum` where there is one."""
    range_ = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum:,}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {range_}")
        return int(text)

    return parse


def share(maximum: float | None) -> Callable[[str], float]:
    """Gives the argument type of numbers from 0 up, to `maximum` where there is one."""
    range_ = "of at least 0" if maximum is None else f"from 0 to {maximum:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 <= value <= (math.inf if maximum is None else maximum) or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {range_}")
        return value

    return parse
