"""How a command's engine is opened on one of several ranks: signals, and the wait for the end."""

import os
import signal
from contextlib import AbstractContextManager
from typing import Self

import pytest

from megallm.commands.ranks import leading, opening, taking_part


class FakeEngine:
    """Keeps what was done to it; ends with an error, if it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self._error = error

    def __enter__(self) -> Self:
        self.log.append("opened")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.log.append("closed")

    def wait_for_shutdown(self) -> None:
        """Raises the error."""
        self.log.append("asked")
        if self._error is not None:
            raise self._error


def handlers() -> list[object]:
    """Gives what SIGINT and SIGTERM do now."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_sigterm_ends_the_leading_rank_as_ctrl_c_does() -> None:
    """Killed by it, it would leave the others to find out, and to say that a rank was lost."""
    engine, before = FakeEngine(), handlers()
    with pytest.raises(KeyboardInterrupt), leading(engine):
        os.kill(os.getpid(), signal.SIGTERM)
    assert engine.log == ["opened", "closed"]
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_left_to_the_leading_rank(number: signal.Signals) -> None:
    """A launcher sends it to all, and a server's answers that are under way need every rank."""
    engine, before = FakeEngine(), handlers()
    with taking_part(engine) as opened:
        assert opened is engine
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL, "a second one must kill"
    assert engine.log == ["opened", "closed", "asked"]
    assert handlers() == before


def test_what_an_engine_failed_of_is_raised_once_it_has_ended() -> None:
    """The rank that lost its memory says so itself; the leading one's message is of another process."""
    before = handlers()
    with pytest.raises(MemoryError, match="none left"), taking_part(FakeEngine(MemoryError("none left"))):
        pass
    assert handlers() == before


def test_engines_are_opened_with_whatever_a_command_gives() -> None:
    """One takes a model and a tokenizer, the other options, too."""
    engine = FakeEngine()
    seen: list[object] = []

    def open_engine(*arguments: object) -> AbstractContextManager[FakeEngine]:
        seen.extend(arguments)
        return engine

    with opening(open_engine, leading)("model", "tokenizer", 3):
        assert seen == ["model", "tokenizer", 3]
    assert engine.log == ["opened", "closed"]
