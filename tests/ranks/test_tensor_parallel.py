"""A model split over two tensor-parallel ranks, started as torchrun does: the same ids as from one rank.

One pair of processes makes all the checks of its program, `tensor_parallel.py`.
"""

from typing import Any

import pytest

from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.device.models import plain_continuation
from tests.ranks.processes import Ranks
from tests.ranks.split_model import split_gpt
from tests.ranks.tensor_parallel import NUM_TOKENS, mixed_prompts

NUM_RANKS = 2


@pytest.fixture(scope="module")
def reports(rank_processes: Ranks) -> list[dict[str, Any]]:
    """Gives what each rank saw, by rank."""
    with rank_processes.running("tests.ranks.tensor_parallel", NUM_RANKS) as processes:
        return [process.report() for process in processes]


def test_greedy_ids_are_those_of_the_whole_model(reports: list[dict[str, Any]]) -> None:
    """With chunked prompts, prefix hits and preemption; the reference is plain passes without an engine."""
    leader = reports[0]
    with quiet_megatron():
        ensure_process_groups()
        whole = split_gpt()
    expected = [plain_continuation(whole, prompt, NUM_TOKENS) for prompt in mixed_prompts()]
    assert leader["greedy"] == leader["again"] == expected
    preemptions, prefix_hit_rate = leader["stats"]
    assert preemptions > 0
    assert prefix_hit_rate > 0.2


def test_a_ranks_part_of_a_layer_runs_as_one_function(reports: list[dict[str, Any]]) -> None:
    """Through megatron's modules a step would cost several times the host's time."""
    assert [report["dense, whole"] for report in reports] == [[True, False]] * NUM_RANKS


def test_pauses_and_suspends_of_every_kind_change_no_id(reports: list[dict[str, Any]]) -> None:
    """They reach every rank's cache, and every rank's program returns from its own call."""
    leader = reports[0]
    for mode in ("persist", "offload", "recompute"):
        assert leader[mode] == leader["greedy"], mode


def test_a_step_costs_one_frame_for_each_rank(reports: list[dict[str, Any]]) -> None:
    """Of its plan's columns: what the ranks are told does not grow with the requests otherwise."""
    leader = reports[0]
    assert leader["frames"] == leader["steps"] * (NUM_RANKS - 1)
    assert leader["bytes"] < leader["steps"] * 1000


def test_ranks_that_do_not_lead_refuse_requests(reports: list[dict[str, Any]]) -> None:
    """Their results would be nowhere."""
    refused = reports[1]["refused"]
    assert (
        refused
        == "RuntimeError: generate() runs on the primary rank in coordinator mode; this is global rank 1"
    )


def test_calls_that_do_not_pair_are_named_on_every_rank(reports: list[dict[str, Any]]) -> None:
    """Each would wait for the other for ever."""
    leader, follower = (report["mismatch"] for report in reports)
    assert leader == follower
    assert leader.startswith("LifecycleError: rank 1 called unpause() where this rank called pause()")


def test_direct_mode_gives_every_rank_the_same(reports: list[dict[str, Any]]) -> None:
    """Scripts that upstream runs on every rank read the results on every rank."""
    assert [report["direct"] for report in reports] == [reports[0]["greedy"]] * NUM_RANKS
    first, second = (report["direct stream"] for report in reports)
    assert first == second
    assert len(first) == 9
