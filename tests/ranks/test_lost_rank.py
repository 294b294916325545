"""A rank that is lost ends every waiter on every other rank, soon, with its name; no process stays."""

import os
import signal
import time

import pytest

from tests.ranks.processes import Ranks

LIMIT_S = 10.0
"""From the loss of a rank until every waiter has its error, on a machine with nothing else to do."""


def busy() -> float:
    """Gives how many times longer things take just now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("kind", "lost", "sent"),
    [
        ("tensor", 1, signal.SIGKILL),
        ("tensor", 0, signal.SIGKILL),
        ("tensor", 1, signal.SIGSTOP),
        ("stages", 1, signal.SIGKILL),
        ("replicas", 0, signal.SIGKILL),
        ("experts", 1, signal.SIGKILL),
    ],
)
def test_a_rank_that_goes_or_hangs_ends_every_waiter(
    rank_processes: Ranks, kind: str, lost: int, sent: signal.Signals
) -> None:
    """A collective waits for ever for a rank that has gone; nobody who called the engine may."""
    with rank_processes.running("tests.ranks.lost_rank", 2, "nothing", kind) as processes:
        for process in processes:
            process.wait_for("running")
        processes[lost].send(sent)
        began = time.time()
        report = processes[1 - lost].report()
    for call, outcome in report.items():
        assert float(outcome["at"]) - began < LIMIT_S * busy(), f"{call}: {outcome}"
        assert outcome["error"].startswith("EngineDeadError"), f"{call}: {outcome}"
        assert outcome["cause"].startswith(f"RankLostError('rank {lost} "), f"{call}: {outcome}"


def test_a_rank_that_raises_ends_all_with_the_same_cause(rank_processes: Ranks) -> None:
    """The first failure, and where it was, is what somebody has to mend."""
    with rank_processes.running("tests.ranks.lost_rank", 2, "raise", "tensor") as processes:
        for process in processes:
            process.wait_for("running")
        reports = [process.report() for process in processes]
    causes = {outcome["cause"] for report in reports for outcome in report.values()}
    assert causes == {"RankLostError('rank 1 failed: ArithmeticError: the weights are broken')"}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_fails_what_it_had_begun_and_the_others_go_on(
    rank_processes: Ranks, sent: signal.Signals
) -> None:
    """The rank is named to whoever's request it was; nobody else notices."""
    with rank_processes.running("tests.ranks.lost_rank", 2, "nothing", "replicas") as processes:
        for process in processes:
            process.wait_for("running")
        processes[1].send(sent)
        began = time.time()
        report = processes[0].report()
    assert float(report["at"]) - began < LIMIT_S * busy(), report
    assert all(failure.startswith("rank 1 is lost") for failure in report["failures"]), report
    assert report["after"] == [100] * 4
