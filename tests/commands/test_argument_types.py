"""Types of command-line arguments."""

import argparse

import pytest

from megallm.commands.argument_types import share, whole


@pytest.mark.parametrize(("minimum", "text", "value"), [(0, "0", 0), (1, "1", 1), (0, "123", 123)])
def test_a_whole_number_is_taken(minimum: int, text: str, value: int) -> None:
    """From the minimum up, the minimum included."""
    assert whole(minimum)(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "1e3", "\N{SUPERSCRIPT TWO}"])
def test_what_is_no_whole_number_is_refused_with_the_minimum(text: str) -> None:
    """The message is all the user sees, so it says what would do."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 1"):
        whole(1)(text)


def test_a_whole_number_over_the_maximum_is_refused_with_the_range() -> None:
    """A port of 70,000 would fail where nobody remembers the option."""
    assert whole(0, 65_535)("65535") == 65_535
    with pytest.raises(argparse.ArgumentTypeError, match=r"'65536' is not a whole number from 0 to 65,535"):
        whole(0, 65_535)("65536")


@pytest.mark.parametrize(
    ("maximum", "text", "value"), [(1.0, "0", 0.0), (1.0, "1", 1.0), (None, "2.5", 2.5), (None, "1e3", 1e3)]
)
def test_a_number_within_the_range_is_taken(maximum: float | None, text: str, value: float) -> None:
    """Both ends belong to it."""
    assert share(maximum)(text) == value


@pytest.mark.parametrize(
    ("maximum", "text", "range_"),
    [
        (1.0, "1.01", "from 0 to 1"),
        (1.0, "-0.1", "from 0 to 1"),
        (1.0, "hot", "from 0 to 1"),
        (None, "inf", "of at least 0"),
        (None, "nan", "of at least 0"),
    ],
)
def test_a_number_outside_is_refused_with_the_range(maximum: float | None, text: str, range_: str) -> None:
    """NaN compares false with everything, and must not slip through."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"is not a number {range_}"):
        share(maximum)(text)
