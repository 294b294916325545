"""A rank that is lost ends every waiter on every other rank, soon, with its name; no process stays."""

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.ranks.processes import ranks

LIMIT_S = 10.0
"""From the loss of a rank until every waiter has its error, on a machine with nothing else to do."""


def busy() -> float:
    """Gives how many times longer things take just now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_running(process: subprocess.Popen[str]) -> None:
    """Waits until a rank says that it runs."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != "running":
        pytest.fail(f"a rank says {line!r}:\n{process.communicate()[1]}")


def report_of(process: subprocess.Popen[str]) -> dict[str, dict[str, str]]:
    """Gives what a rank's waiters got, once it has ended by itself."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


@pytest.mark.parametrize(("lost", "sent"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_goes_or_hangs_ends_every_waiter(lost: int, sent: signal.Signals) -> None:
    """A collective waits for ever for a rank that has gone; nobody who called the engine may."""
    with ranks("tests.ranks.lost_rank", 2, "nothing") as processes:
        for process in processes:
            wait_running(process)
        processes[lost].send_signal(sent)
        began = time.time()
        report = report_of(processes[1 - lost])
    for call, outcome in report.items():
        assert float(outcome["at"]) - began < LIMIT_S * busy(), f"{call}: {outcome}"
        assert outcome["error"].startswith("EngineDeadError"), f"{call}: {outcome}"
        assert outcome["cause"].startswith(f"RankLostError('rank {lost} "), f"{call}: {outcome}"


def test_a_rank_that_raises_ends_all_with_the_same_cause() -> None:
    """The first failure, and where it was, is what somebody has to mend."""
    with ranks("tests.ranks.lost_rank", 2, "raise") as processes:
        for process in processes:
            wait_running(process)
        reports = [report_of(process) for process in processes]
    causes = {outcome["cause"] for report in reports for outcome in report.values()}
    assert causes == {"RankLostError('rank 1 failed: ArithmeticError: the weights are broken')"}
