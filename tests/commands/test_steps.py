"""The lines of a command's steps."""

import io
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import override

import pytest

from megallm.commands.steps import Steps


def test_each_step_is_a_line_with_its_own_seconds() -> None:
    """Who waits wants to know which step takes so long, not how long it is since the start."""
    err = io.StringIO()
    steps = Steps(err)
    first_s = steps.done("loaded a model")
    second_s = steps.done("started the engine")
    assert re.fullmatch(
        r"megallm: loaded a model: \d+\.\d s\nmegallm: started the engine: \d+\.\d s\n", err.getvalue()
    )
    assert 0 <= first_s + second_s <= steps.total_s


def test_what_lies_between_two_steps_is_counted_to_neither() -> None:
    """A server that ran for a week did not take a week to stop."""
    steps = Steps(io.StringIO())
    steps.done("started")
    before_s = steps.total_s
    steps.begin()
    assert steps.done("stopped") <= steps.total_s - before_s


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_being_done_until_it_is_done_or_fails() -> None:
    """A first start compiles kernels, and looks as if it hung; an error has its line for itself."""
    err = Terminal()
    with Steps(err).showing("starting"):
        assert err.getvalue() == "starting ..."
    assert err.getvalue() == f"starting ...\r{' ' * 12}\r"
    with pytest.raises(OSError, match="no memory"), Steps(err).showing("starting"):
        raise OSError("no memory")
    assert err.getvalue().endswith(f"{' ' * 12}\r")


def test_an_engine_is_open_while_the_block_runs_and_its_start_is_a_step() -> None:
    """Its start takes longest of all, and one that is left open keeps the device."""
    err = io.StringIO()
    log: list[str] = []

    @contextmanager
    def open_engine() -> Generator[str]:
        log.append("opened")
        try:
            yield "an engine"
        finally:
            log.append("closed")

    with Steps(err).starting(open_engine) as engine:
        assert (engine, log) == ("an engine", ["opened"])
        assert re.fullmatch(r"megallm: started the engine: \d+\.\d s\n", err.getvalue())
    assert log == ["opened", "closed"]
    with pytest.raises(OSError, match="no memory"), Steps(err).starting(open_engine):
        raise OSError("no memory")
    assert log == ["opened", "closed"] * 2


def test_a_log_holds_what_was_done_alone() -> None:
    """Where nothing can be taken back, nothing is said too early."""
    for err, are_shown in ((io.StringIO(), True), (Terminal(), False)):
        with Steps(err, are_shown=are_shown).showing("starting"):
            assert err.getvalue() == ""


def test_nothing_is_said_where_nobody_watches() -> None:
    """A log of a thousand runs holds their summaries, not their steps."""
    err = io.StringIO()
    assert Steps(err, are_shown=False).done("loaded a model") >= 0
    assert err.getvalue() == ""
