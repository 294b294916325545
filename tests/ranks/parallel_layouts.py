"""One rank's program: models in one layout of ranks, and all that their engines give.

Arguments: tensor-parallel and pipeline-parallel ranks, "sp" where the model is sequence-parallel, "all" for
every KV mode and kind of model. Every rank runs it, as under torchrun, and prints one JSON line of what it
saw; the test runs `seen_of` on the whole model.
"""

import json
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed

from megallm import MegatronLLM
from megallm.models.megatron_setup import quiet_megatron
from tests.fakes import FakeTokenizer
from tests.ranks.staged_model import NUM_KV_HEADS, NUM_LAYERS, WHOLE, Layout, staged_gpt
from tests.ranks.tensor_parallel import NUM_BLOCKS, ids_of, mixed_prompts, with_lifecycle
from tests.small_llm import greedy, settings

KINDS: dict[str, dict[str, bool]] = {"dense": {}, "experts": {"has_experts": True}, "tied": {"is_tied": True}}
ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["X", "Y"]}},
    "required": ["a", "b"],
}


class LetterTokenizer(FakeTokenizer):
    """One token a character, of which the model knows all: such that grammars can say what comes."""

    eod = 95
    vocab_size = 96

    def token_bytes(self, token_id: int) -> bytes:
        """Gives a token's bytes."""
        return bytes([32 + token_id])


def make_llm(
    model: Any, layout: Layout = WHOLE, **changes: Any
) -> MegatronLLM:  # Any: megatron's; its fields
    """Gives an engine with a cache of `NUM_BLOCKS` on the rank with the most layers."""
    fields = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens": 48, **changes}
    # `settings` counts blocks of three layers of two KV heads
    layers_and_heads = layout.most_layers * NUM_KV_HEADS // layout.tp
    config = settings(num_blocks=-(-NUM_BLOCKS * layers_and_heads // (NUM_LAYERS * 2)), **fields)
    return MegatronLLM(model=model, tokenizer=LetterTokenizer(), inference_config=config)


def seen_of(llm: MegatronLLM) -> dict[str, Any]:  # Any: JSON
    """Gives what the leader's requests of every kind are answered by."""
    prompts = mixed_prompts()[:4]
    greedily = ids_of(llm)
    stats = llm.engine.stats()
    kinds: dict[str, dict[str, Any]] = {
        "logged": {"return_log_probs": True, "top_n_logprobs": 3},
        "sampled": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3, "return_log_probs": True},
        "ruled": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: 2.0}},
        "json": {"json_schema": ANSWER},
        "regex": {"regex": "[0-9]{3}-[A-C]+", "temperature": 1.0, "seed": 1},
    }
    params = [greedy(10, **fields) for fields in kinds.values() for _ in prompts]
    results = llm.generate(prompts * len(kinds), params, progress=False)
    return {
        "greedy": greedily,
        "preemptions": stats.preemptions,
        "prefix_hit_rate": stats.prefix_hit_rate,
        "tokens": [each.generated_tokens for each in results],
        "log_probs": [each.generated_log_probs or [] for each in results],
        "top": [list(map(list, each.generated_top_n_logprobs or [])) for each in results],
        "scores": [each.prompt_log_probs for each in llm.score(prompts[:3])],
    }


def main() -> None:
    """Runs every check on one set of processes: their start is what takes long."""
    tp, pp, *others = sys.argv[1:]
    layout = Layout(tp=int(tp), pp=int(pp), sequence_parallel="sp" in others)
    distributed.init_process_group("gloo")
    with quiet_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            create_gloo_process_groups=False,
        )
    report: dict[str, object] = {}
    with quiet_megatron():
        model = staged_gpt(layout)
    with make_llm(model, layout) as llm:
        report["seen"] = seen_of(llm) if llm.is_primary_rank else None
    modes: dict[str, object] = {}
    for mode in ("persist", "offload", "recompute") if "all" in others else ("recompute",):
        with make_llm(model, layout, kv_cache_management_mode=mode) as llm:
            modes[mode] = with_lifecycle(llm)
    report["modes"] = modes
    if "all" in others:
        report |= {name: _greedy_of(layout, **kind) for name, kind in KINDS.items() if kind}
        report["no layers"] = _greedy_of(Layout(pp=2, stages="E|tttL"))
    print(json.dumps(report), flush=True)  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()


def _greedy_of(layout: Layout, **kind: bool) -> list[list[int]] | None:
    with quiet_megatron():
        model = staged_gpt(layout, **kind)
    with make_llm(model, layout) as llm:
        return ids_of(llm) if llm.is_primary_rank else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
