"""The CUDA profiler of this process: what a recording tool hears, and what is said where there is no CUDA."""

import sys
from types import SimpleNamespace

import pytest

from megallm.core_async.device.cuda_profiler import profile_cuda
from megallm.core_async.errors import NoProfilerError
from tests.device.profilers import FakeProfiler


def test_a_tool_records_from_start_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is all that it hears."""
    profiler = FakeProfiler.installed(monkeypatch)
    profile_cuda("start")
    profile_cuda("stop")
    assert profiler.told == ["start", "stop"]


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a recording would wait for nothing; neither is torch imported for it."""
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(NoProfilerError, match="does not run on CUDA"):
        profile_cuda("start")
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(NoProfilerError, match="does not run on CUDA"):
        profile_cuda("start")
    assert "torch" not in sys.modules


def test_what_cuda_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is the only one there is, and the engine must not end of it."""
    FakeProfiler.installed(monkeypatch, refusal="not permitted")
    with pytest.raises(NoProfilerError, match="does not start its profiler: not permitted"):
        profile_cuda("start")


def test_another_action_is_refused() -> None:
    """A misspelt stop must not start."""
    with pytest.raises(ValueError, match="action is 'pause'"):
        profile_cuda("pause")


@pytest.mark.gpu
def test_the_driver_takes_both_calls() -> None:
    """Also where no tool runs the process: then they do nothing."""
    import torch

    assert torch.cuda.is_available()
    profile_cuda("start")
    profile_cuda("stop")
