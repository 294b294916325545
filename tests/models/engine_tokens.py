"""Greedy tokens of a loaded model, through a whole engine."""

from typing import Any

from megatron.core.inference.config import InferenceConfig

from megallm.core_async.sampling_params import SamplingParams
from megallm.sync.llm import MegatronLLM

SETTINGS: dict[str, Any] = {  # Any: fields of many types
    "block_size_tokens": 8,
    "buffer_size_gb": 0.01,
    "max_requests": 4,
    "max_sequence_length": 64,
}


def engine_tokens(
    model: Any, tokenizer: Any, prompt: list[int], num_tokens: int
) -> list[int]:  # Any: untyped
    """Gives the greedy continuation of a prompt, which no token ends."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, termination_id=-1)
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=InferenceConfig(**SETTINGS)) as llm:
        (result,) = llm.generate([prompt], params)
    return result.generated_tokens
