"""One rank's program: a model over tensor-parallel ranks, what its engine generates, and its lifecycle.

Every rank runs it, as under torchrun; each prints one JSON line of what it saw.
"""

import json
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed

from megallm import MegatronLLM
from megallm.core_async.builder import Parts
from megallm.core_async.device.model import ModelHook
from megallm.core_async.ranks.calls import LeaderCalls
from megallm.core_async.ranks.leader import Leader
from megallm.models.megatron_setup import quiet_megatron
from tests.fakes import FakeTokenizer
from tests.ranks.split_model import split_gpt
from tests.small_llm import greedy, settings

NUM_TOKENS = 12
NUM_BLOCKS = 32
"""Too few for sixteen requests at once: some are preempted."""


def mixed_prompts() -> list[list[int]]:
    """Gives sixteen prompts of many lengths; half of them begin alike."""
    source = random.Random(5)
    shared = [source.randrange(96) for _ in range(20)]
    prompts = [[source.randrange(96) for _ in range(source.randrange(1, 40))] for _ in range(16)]
    return [shared + prompt[:12] if place % 2 else prompt for place, prompt in enumerate(prompts)]


def make_llm(
    model: Any,  # Any: megatron's
    *,
    num_ranks: int | None = None,
    use_coordinator: bool = True,
    **changes: Any,  # Any: fields of InferenceConfig
) -> MegatronLLM:
    """Gives an engine with a small cache and every feature of the planner on."""
    fields = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens": 48, **changes}
    # `settings` counts blocks of a model of two KV heads a rank; this one has four, split over the ranks
    config = settings(num_blocks=NUM_BLOCKS * 2 // (num_ranks or distributed.get_world_size()), **fields)
    return MegatronLLM(
        model=model, tokenizer=FakeTokenizer(), inference_config=config, use_coordinator=use_coordinator
    )


def ids_of(llm: MegatronLLM, **fields: Any) -> list[list[int]]:  # Any: fields of SamplingParams
    """Gives what the sixteen prompts are continued by."""
    results = llm.generate(mixed_prompts(), greedy(NUM_TOKENS, **fields))
    return [result.generated_tokens for result in results]


def with_lifecycle(llm: MegatronLLM) -> list[list[int]] | None:
    """Generates while every rank's program pauses and suspends; a request is under way when that begins."""
    with ThreadPoolExecutor(1) as threads:
        running = None
        if llm.is_primary_rank:
            stream = llm.stream([1, 2, 3], greedy(60))
            next(stream)
            running = threads.submit(ids_of, llm)
        llm.pause()
        llm.unpause()
        llm.suspend()
        distributed.barrier()  # as a trainer's own collectives
        llm.resume()
        llm.unpause()
        llm.pause("wait")
        llm.unpause()
        return None if running is None else running.result()


def seen(call: Callable[[], object]) -> str | None:
    """Gives the name of the error that a call raises, and its text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one it is, is the test's matter
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Runs every check on one pair of processes: their start is what takes long."""
    distributed.init_process_group("gloo")
    num_ranks = distributed.get_world_size()
    with quiet_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=num_ranks, create_gloo_process_groups=False
        )
        model = split_gpt(distributed.get_rank(), num_ranks)
    hook = ModelHook(model)
    report: dict[str, object] = {"dense, whole": [hook.is_dense, hook.is_whole]}
    with make_llm(model) as llm:
        if llm.is_primary_rank:
            report["greedy"] = ids_of(llm)
            report["stats"] = [llm.engine.stats().preemptions, llm.engine.stats().prefix_hit_rate]
            before, steps = traffic(llm), llm.engine.stats().step
            report["again"] = ids_of(llm)
            after = traffic(llm)
            report["steps"] = llm.engine.stats().step - steps
            report["frames"], report["bytes"] = after[0] - before[0], after[1] - before[1]
            report["sampled"] = ids_of(llm, temperature=1.0, top_k=20, top_p=0.9)
            report["scores"] = [each.prompt_log_probs for each in llm.score(mixed_prompts()[:3])]
        else:
            report["refused"] = seen(lambda: llm.generate("hello"))
        if num_ranks > 1:
            report["mismatch"] = seen(llm.pause if llm.is_primary_rank else llm.unpause)
    for mode in ("persist", "offload", "recompute"):
        with make_llm(model, kv_cache_management_mode=mode) as llm:
            report[mode] = with_lifecycle(llm)
    with make_llm(model, use_coordinator=False) as llm:
        report["direct"] = ids_of(llm)
        report["direct stream"] = [
            token for delta in llm.stream([1, 2, 3], greedy(9)) for token in delta.token_ids
        ]
    print(json.dumps(report), flush=True)  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()


def traffic(llm: MegatronLLM) -> tuple[int, int]:
    """Gives the frames and bytes that the leader has sent."""
    parts: Parts = vars(llm)["_parts"]  # which are not public
    calls = parts.calls
    if not isinstance(calls, LeaderCalls):
        return 0, 0
    (leader,) = calls.others
    assert isinstance(leader, Leader), leader
    return leader.traffic


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
