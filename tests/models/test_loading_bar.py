"""What a load shows."""

import pytest

from megallm.models.loading_bar import loading_bar


def test_it_shows_the_step_and_how_far_it_is_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """A load of minutes without a word looks like one that hangs."""
    with loading_bar(is_shown=True) as bar:
        bar.say("importing torch")
        bar.begin(2_000_000)
        bar.advance(1_000_000)
        bar.advance(1_000_000)
        bar.say("setting up")
    shown = capsys.readouterr().err
    assert (
        shown.index("importing torch ...") < shown.index("reading weights:   0%") < shown.index("setting up")
    )
    assert "0.00/2.00M" in shown
    assert shown.endswith("\r"), "the line is still there"


def test_it_writes_nothing_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file is no terminal."""
    with loading_bar(is_shown=None) as bar:
        bar.say("importing torch")
        bar.begin(10)
        bar.advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_load_that_fails_takes_its_line_away(capsys: pytest.CaptureFixture[str]) -> None:
    """The error stands on a line of its own."""
    with pytest.raises(OSError, match="full"), loading_bar(is_shown=True):
        raise OSError("full")
    assert capsys.readouterr().err.endswith("\r")


def test_a_rank_that_says_nothing_may_take_its_line_away_early(capsys: pytest.CaptureFixture[str]) -> None:
    """Which rank a process is shows after the line was begun."""
    with loading_bar(is_shown=True) as bar:
        bar.close()
        before = capsys.readouterr().err
        bar.say("unheard")
        bar.begin(10)
        bar.advance(10)
    assert before.endswith("\r")
    assert capsys.readouterr().err == ""
