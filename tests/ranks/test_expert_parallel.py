"""Experts over two ranks, of one replica or of two whose steps differ: the same as from one rank.

One pair of processes runs all the cases of its program, `expert_parallel.py`.
"""

from typing import Any

import pytest

from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.ranks.expert_parallel import DISPATCHERS, NUM_RANKS, SPLITS, Outputs, cases, run_cases
from tests.ranks.processes import Ranks
from tests.ranks.split_moe import split_moe

SPREAD, *OTHERS = SPLITS


@pytest.fixture(scope="module")
def reports(rank_processes: Ranks) -> list[dict[str, Any]]:
    """Gives what each rank saw, by rank."""
    with rank_processes.running("tests.ranks.expert_parallel", NUM_RANKS) as processes:
        return [process.report() for process in processes]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Outputs]]:
    """Gives what the whole model's runner samples in each replica's steps."""
    with quiet_megatron():
        ensure_process_groups()
        whole = split_moe()
    every = {name: steps for each in DISPATCHERS for name, steps in cases(SPREAD, each).items()}
    return [run_cases(whole, replica, every) for replica in range(NUM_RANKS)]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_replicas_sample_what_the_whole_model_does_whatever_the_others_steps(
    reports: list[dict[str, Any]], expected: list[dict[str, Outputs]], dispatcher: str
) -> None:
    """Tokens cross over in every layer, in unequal numbers, and a replica without any has to take part."""
    for replica, report in enumerate(reports):
        outputs = report[SPREAD][dispatcher]
        assert outputs.keys() == cases(SPREAD, dispatcher).keys()
        for name, each in outputs.items():
            assert_same(each, expected[replica][name])
    assert any(tokens for tokens, _ in reports[0][SPREAD][dispatcher]["second is idle"])
    assert not any(tokens for tokens, _ in reports[1][SPREAD][dispatcher]["second is idle"])


@pytest.mark.parametrize("split", OTHERS)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_way_to_split_experts_samples_what_the_whole_model_does(
    reports: list[dict[str, Any]], expected: list[dict[str, Outputs]], split: str, dispatcher: str
) -> None:
    """Tensor parallelism inside experts, or beside them: the sums over ranks must add nothing twice."""
    for rank, report in enumerate(reports):
        replica = rank if SPLITS[split].is_spread else 0
        for name, each in report[split][dispatcher].items():
            assert_same(each, expected[replica][name])


def assert_same(outputs: list[Any], wanted: Outputs) -> None:
    """Compares tokens, and log-probs as sums over ranks round them."""
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(outputs, wanted, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, abs=2e-5)


def test_experts_are_spread_where_their_ranks_run_other_requests(reports: list[dict[str, Any]]) -> None:
    """It is what keeps ranks in step; experts inside one replica are in step already."""
    for report in reports:
        for split, sizes in SPLITS.items():
            assert report[split]["experts"] == [[0, 1], sizes.is_spread]


def test_options_that_need_tokens_on_every_rank_are_refused_by_name(reports: list[dict[str, Any]]) -> None:
    """They would hang in a collective, or exchange bytes of different types."""
    for option, message in reports[0][SPREAD]["refused"].items():
        assert message.startswith("the experts are spread over ranks [0, 1], which run other requests")
        assert option in message
    for message in reports[0]["whole experts, one replica"]["refused"].values():
        assert message == "taken"


def test_dispatchers_are_given_back(reports: list[dict[str, Any]]) -> None:
    """A trainer's next step goes through megatron's own."""
    assert all(report[split]["is unbound"] for report in reports for split in SPLITS)


def test_reference_ends_with_text_of_every_replica(expected: list[dict[str, Outputs]]) -> None:
    """Comparing nothing with nothing would pass."""
    for replica in expected:
        assert sum(len(tokens) for tokens, _ in replica["both"]) > 10
        assert len({tuple(tokens) for outputs in replica.values() for tokens, _ in outputs}) > 10
