"""What a command says on stderr of its steps: a line for each, with its seconds. Knows no command."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TextIO


class Steps:
    """Says what took how long; a step begins where the one before it ended."""

    def __init__(self, stderr: TextIO, *, are_shown: bool = True) -> None:
        self._stderr = stderr
        self._are_shown = are_shown
        self._began = self._last = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Gives the seconds since the first step began."""
        return time.perf_counter() - self._began

    def begin(self) -> None:
        """Lets the next step begin now: what came before it was none."""
        self._last = time.perf_counter()

    @contextmanager
    def showing(self, doing: str) -> Generator[None]:
        """Shows on a terminal what is being done while a block runs."""
        if not (self._are_shown and self._stderr.isatty()):
            yield
            return
        self._write(f"{doing} ...")
        try:
            yield
        finally:  # an error stands on a line of its own, too
            self._write(f"\r{' ' * len(f'{doing} ...')}\r")

    @contextmanager
    def starting[T](self, open_engine: Callable[[], AbstractContextManager[T]]) -> Generator[T]:
        """Opens an engine, which is a step, until the block ends."""
        with ExitStack() as leaving:
            with self.showing("starting the engine"):
                engine = leaving.enter_context(open_engine())
            self.done("started the engine")
            yield engine

    def done(self, what: str) -> float:
        """Ends a step; gives its seconds."""
        now = time.perf_counter()
        spent_s, self._last = now - self._last, now
        self.say(f"{what}: {spent_s:.1f} s")
        return spent_s

    def say(self, line: str) -> None:
        """Says something that is no step."""
        if self._are_shown:
            self._write(f"megallm: {line}\n")

    def _write(self, text: str) -> None:
        self._stderr.write(text)
        self._stderr.flush()
