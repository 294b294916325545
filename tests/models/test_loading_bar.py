"""The bar of a load."""

import pytest

from megallm.models.loading_bar import loading_bar


def test_it_shows_how_far_it_is_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """A load of minutes without a word looks like one that hangs."""
    with loading_bar(2_000_000, is_shown=True) as advance:
        advance(1_000_000)
        advance(1_000_000)
    assert "loading" in capsys.readouterr().err


def test_it_writes_nothing_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file is no terminal."""
    with loading_bar(10, is_shown=None) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")
