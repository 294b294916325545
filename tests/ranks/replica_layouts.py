"""One rank's program: a model in several replicas, and what requests that run on all of them give.

Arguments: tensor-parallel ranks of each replica, and "dense" or "experts", which the replicas hold a part of
each. Every rank runs it, as under torchrun, and prints one JSON line of what it saw.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed

from megallm import MegatronLLM
from megallm.models.megatron_setup import quiet_megatron
from tests.ranks.split_model import split_gpt
from tests.ranks.split_moe import cpu_as_cuda, split_moe
from tests.ranks.tensor_parallel import ids_of, make_llm, seen, with_lifecycle
from tests.small_llm import greedy


def model_of(kind: str, tp: int) -> Any:  # Any: megatron's model
    """Gives this rank's part."""
    with quiet_megatron():
        if kind == "experts":
            return split_moe("alltoall")
        rank = 0 if tp == 1 else distributed.get_rank() % tp
        return split_gpt(rank, tp)


def seen_of(llm: MegatronLLM) -> dict[str, Any]:  # Any: JSON
    """Gives what requests of many kinds are answered by."""
    sampled = ids_of(llm, temperature=1.0, top_k=20, top_p=0.9, seed=5)
    stream = llm.stream([5, 6, 7], greedy(10))
    streamed = [token for delta in stream for token in delta.token_ids]
    left = llm.stream([5, 6, 7], greedy(60))
    next(left)
    left.close()
    return {
        "greedy": ids_of(llm),
        "sampled": sampled,
        "streamed": streamed,
        "scores": [each.prompt_log_probs for each in llm.score([[1, 2, 3, 4], [9, 8, 7]])],
    }


def main() -> None:
    """Runs every check on one set of processes: their start is what takes long."""
    tp, kind = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo")
    num_replicas = distributed.get_world_size() // tp
    with quiet_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=num_replicas if kind == "experts" else 1,
            create_gloo_process_groups=False,
        )
    report: dict[str, object] = {}
    with cpu_as_cuda() if kind == "experts" else nullcontext():
        model = model_of(kind, tp)
        with make_llm(model, num_ranks=tp) as llm:
            if llm.is_primary_rank:
                report["seen"] = seen_of(llm)
                stats = llm.engine.stats()
                report["stats"] = [stats.running, stats.waiting, stats.used_blocks]
            else:
                report["refused"] = seen(lambda: llm.generate("hello"))
            report["steps"] = llm.engine.times.num_steps
        modes: dict[str, object] = {}
        for mode in ("persist", "offload", "recompute"):
            with make_llm(model, num_ranks=tp, kv_cache_management_mode=mode) as llm:
                modes[mode] = with_lifecycle(llm)
        report["modes"] = modes
    print(json.dumps(report), flush=True)  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
