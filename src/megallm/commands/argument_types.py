"""Types of command-line arguments: what argparse turns texts into, with errors that name the range."""

import argparse
from collections.abc import Callable


def whole(minimum: int) -> Callable[[str], int]:
    """Gives the argument type of whole numbers from `minimum` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def share(maximum: float | None) -> Callable[[str], float]:
    """Gives the argument type of numbers from 0 up, to `maximum` where there is one."""
    limit = "inf" if maximum is None else f"{maximum:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= float(limit) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {limit}")
        return value

    return parse
