"""A CUDA profiler that notes what it is told, in the place of torch's."""

import sys
from types import SimpleNamespace
from typing import Self

import pytest


class FakeProfiler:
    """What `torch.cuda.profiler` has."""

    def __init__(self, refusal: str = "") -> None:
        self.told: list[str] = []
        self._refusal = refusal

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch, refusal: str = "") -> Self:
        """Gives the one that this process has from now on. `refusal`: what CUDA says to everything."""
        made = cls(refusal)
        cuda = SimpleNamespace(is_available=lambda: True, profiler=made)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        return made

    def start(self) -> None:
        """See torch."""
        self._note("start")

    def stop(self) -> None:
        """See torch."""
        self._note("stop")

    def _note(self, action: str) -> None:
        if self._refusal:
            raise RuntimeError(self._refusal)
        self.told.append(action)
