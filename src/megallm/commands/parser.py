"""The command line's parser: argparse's, whose errors end as one line that says what to do.

Knows argparse and near misses; knows no command.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, override


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError for bad usage, so that it ends like every other error."""

    @override
    def error(self, message: str) -> NoReturn:
        """Raises: ValueError, always."""
        raise ValueError(f"{message}; see {self.prog} --help")


class ShowVersion(argparse.Action):
    """Prints the version that is installed, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_options: Any) -> None:  # Any: argparse's
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_arguments: object, **_options: object) -> None:
        from importlib.metadata import version  # it takes a third of what all else here does

        sys.stdout.write(f"{parser.prog} {version('megallm')}\n")
        parser.exit()


def refuse_unknown_command(
    parser: argparse.ArgumentParser, argv: Sequence[str], known: Iterable[str]
) -> None:
    """Refuses a first argument that is no command.

    Raises: ValueError naming it, the one that was meant, and all there are.
    """
    names = list(known)
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        parser.error(f"no command {argv[0]}{_meant(argv[0], names)}; there are {', '.join(names)}")


def refuse_left_over(parser: argparse.ArgumentParser, left_over: Sequence[str]) -> None:
    """Refuses arguments that a command's parser knew nothing to do with.

    Raises: ValueError naming the first, and the option that was meant.
    """
    for argument in left_over:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            options = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001 - argparse has no other way
            parser.error(f"unknown option {name}{_meant(name, options)}")
        parser.error(f"unexpected argument {argument!r}")


def _meant(name: str, known: Sequence[str]) -> str:
    return "".join(f", did you mean {match}?" for match in get_close_matches(name, known, n=1))
