"""The parser's errors; their lines are in tests/test_cli.py, too."""

import argparse
from importlib.metadata import version

import pytest

from megallm.commands.parser import OneLineParser, ShowVersion, refuse_left_over, refuse_unknown_command


def small_parser() -> argparse.ArgumentParser:
    """Gives a parser of one option."""
    parser = OneLineParser(prog="megallm answer")
    parser.add_argument("--temperature")
    return parser


def test_bad_usage_is_an_error_like_every_other_one() -> None:
    """The one of argparse prints a page and exits from within."""
    with pytest.raises(
        ValueError, match=r"^argument --temperature: expected one .*; see megallm answer --help"
    ):
        small_parser().parse_args(["--temperature"])


@pytest.mark.parametrize(
    ("left_over", "said"),
    [
        (["--temprature=1"], r"^unknown option --temprature, did you mean --temperature\?; see megallm"),
        (["--xyz", "1"], r"^unknown option --xyz; see megallm answer --help$"),
        (["more"], r"^unexpected argument 'more'; see megallm answer --help$"),
    ],
)
def test_what_is_left_over_is_refused_with_what_was_meant(left_over: list[str], said: str) -> None:
    """One wrong letter is the usual reason, and it is hard to see."""
    with pytest.raises(ValueError, match=said):
        refuse_left_over(small_parser(), left_over)
    refuse_left_over(small_parser(), [])


def test_a_wrong_command_is_refused_with_those_there_are() -> None:
    """A newcomer guesses, so the answer is the list."""
    known = {"answer": 1, "serve": 2}
    for argv in ([], ["--help"], ["serve", "answr"]):
        refuse_unknown_command(small_parser(), argv, known)
    with pytest.raises(ValueError, match=r"no command answr, did you mean answer\?; there are answer, serve"):
        refuse_unknown_command(small_parser(), ["answr"], known)


def test_the_version_is_shown_and_nothing_else_done(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a report of a fault is asked for."""
    parser = OneLineParser(prog="megallm")
    parser.add_argument("--version", action=ShowVersion)
    parser.add_argument("needed")
    with pytest.raises(SystemExit) as leaving:
        parser.parse_args(["--version"])
    assert (leaving.value.code, capsys.readouterr().out) == (0, f"megallm {version('megallm')}\n")
