"""A model over stages of a pipeline, tensor-parallel ranks or both, sequence-parallel too: as from one rank.

One set of processes for each layout makes all the checks of its program, `parallel_layouts.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.ranks.parallel_layouts import KINDS, ids_of, make_llm, seen_of
from tests.ranks.processes import Ranks
from tests.ranks.staged_model import WHOLE, staged_gpt

STAGES, BOTH, SEQUENCE_PARALLEL = "1 2 all", "2 2", "2 1 sp"
LAYOUTS = [STAGES, BOTH, SEQUENCE_PARALLEL]
type Report = dict[str, Any]  # Any: JSON


@pytest.fixture(scope="module")
def report_of(rank_processes: Ranks) -> Callable[[str], Report]:
    """Gives what gives what the leader of a layout saw."""

    @functools.cache
    def report(layout: str) -> Report:
        arguments = layout.split()
        num_ranks = int(arguments[0]) * int(arguments[1])
        with rank_processes.running("tests.ranks.parallel_layouts", num_ranks, *arguments) as processes:
            return processes[0].report()

    return report


@functools.cache
def whole(kind: str = "dense") -> Report:
    """Gives what an engine of the whole model gives."""
    with quiet_megatron():
        ensure_process_groups()
        model = staged_gpt(WHOLE, **KINDS[kind])
    with make_llm(model) as llm:
        return seen_of(llm) if kind == "dense" else {"greedy": ids_of(llm)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_answer_is_that_of_the_whole_model(layout: str, report_of: Callable[[str], Report]) -> None:
    """With prefix hits and preemption; of drawn tokens, penalties, biases, grammars; and log-probs of all."""
    seen, expected = report_of(layout)["seen"], whole()
    assert seen["preemptions"] > 0
    assert seen["prefix_hit_rate"] > 0.2
    for name in ("greedy", "tokens", "top"):
        assert seen[name] == expected[name], name
    for name in ("log_probs", "scores"):
        for ours, theirs in zip(seen[name], expected[name], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pauses_and_suspends_change_no_id(layout: str, report_of: Callable[[str], Report]) -> None:
    """They reach every stage's cache; of every kind, where there are stages."""
    modes = report_of(layout)["modes"]
    assert modes == dict.fromkeys(modes, whole()["greedy"])
    assert len(modes) == (3 if layout == STAGES else 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dense"])
def test_experts_and_tied_weights_run_in_stages(kind: str, report_of: Callable[[str], Report]) -> None:
    """Tied, the last stage has weights of its own for what the first one looks up."""
    assert report_of(STAGES)[kind] == whole(kind)["greedy"]


def test_a_stage_may_be_without_layers(report_of: Callable[[str], Report]) -> None:
    """How many blocks there are, the other stage says."""
    assert report_of(STAGES)["no layers"] == whole()["greedy"]
