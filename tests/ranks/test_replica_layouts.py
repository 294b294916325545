"""A model in replicas, of one rank or more each, and with experts spread over them: as from one rank."""

import functools
from typing import Any

import pytest

from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.ranks.processes import Ranks
from tests.ranks.replica_layouts import seen_of
from tests.ranks.split_model import split_gpt
from tests.ranks.split_moe import cpu_as_cuda, split_moe
from tests.ranks.tensor_parallel import make_llm

type Report = dict[str, Any]  # Any: JSON


@functools.cache
def whole(kind: str) -> Report:
    """Gives what an engine of the whole model gives."""
    with quiet_megatron():
        ensure_process_groups()
        with cpu_as_cuda():
            model = split_moe("alltoall") if kind == "experts" else split_gpt()
            with make_llm(model, num_ranks=1) as llm:
                return seen_of(llm)


@pytest.mark.parametrize(("num_ranks", "tp", "kind"), [(2, 1, "dense"), (4, 2, "dense"), (2, 1, "experts")])
def test_replicas_answer_as_one_rank_does(num_ranks: int, tp: int, kind: str, rank_processes: Ranks) -> None:
    """Whichever runs a request, and however often they pause and give their memory back."""
    with rank_processes.running("tests.ranks.replica_layouts", num_ranks, str(tp), kind) as processes:
        first, *others = (process.report() for process in processes)
    expected = whole(kind)
    for name in ("greedy", "sampled", "streamed"):
        assert first["seen"][name] == expected[name], name
    for ours, theirs in zip(first["seen"]["scores"], expected["scores"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert first["stats"] == [0, 0, 0]
    assert first["modes"] == dict.fromkeys(("persist", "offload", "recompute"), expected["greedy"])
    assert all("global rank" in other["refused"] for other in others)
