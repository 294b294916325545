"""The machine's facts and repetition."""

import os
import platform
from importlib import metadata

import pytest

from benchmarks.measure import alternate, busy_warning, machine, num_cores


def test_a_figure_carries_the_machine_it_was_taken_on() -> None:
    """Without processor, cores and versions two figures can't be compared."""
    facts = machine()
    assert isinstance(facts["cpu"], str)
    assert facts["cpu"]
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["python"] == platform.python_version()
    packages = facts["packages"]
    assert isinstance(packages, dict)
    assert packages["anyio"] == metadata.version("anyio")
    assert {"gpus", "commit", "load_average"} <= facts.keys()


def test_engines_take_turns() -> None:
    """A slow minute of the machine must not hit one engine alone."""
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    outcomes = alternate({"a": lambda: run("a"), "b": lambda: run("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert outcomes == {"a": [1, 3], "b": [2, 4]}


@pytest.mark.parametrize(("share", "is_warned"), [(0.0, False), (0.2, False), (0.6, True), (4.0, True)])
def test_a_busy_machine_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, share: float, *, is_warned: bool
) -> None:
    """Figures of a busy machine look like any others, and are wrong by half."""
    monkeypatch.setattr(os, "getloadavg", lambda: (share * num_cores(), 0.0, 0.0))
    warning = busy_warning()
    assert (warning is not None) is is_warned
    assert warning is None or f"{num_cores()} cores" in warning
