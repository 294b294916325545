"""On a GPU: suspend gives memory back to the driver, and nothing is lost over many cycles and requests."""

import random
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode

from benchmarks.shapes import NumberTokenizer
from megallm import InferenceConfig, MegatronLLM, SamplingParams
from tests.device.test_gpu_invariance import SIZE, model

pytestmark = pytest.mark.gpu

__all__ = ["model"]
CACHE_GB = 2
CYCLES = 12
MIB = 1 << 20


def used_bytes() -> int:
    """Gives what the driver has lent out."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_sleep_gives_the_cache_back_and_answers_go_on(model: Any, mode: str) -> None:
    """A trainer needs the memory between two rollouts; graphs read the cache where it is afterwards."""
    config = InferenceConfig(
        kv_cache_management_mode=KVCacheManagementMode(mode),
        buffer_size_gb=CACHE_GB,
        max_sequence_length=512,
        max_requests=16,
        max_tokens=256,
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(SIZE.vocab_size) for _ in range(40)] for _ in range(16)]
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=NumberTokenizer(SIZE.vocab_size), inference_config=config) as llm:
        expected = [result.generated_tokens for result in llm.generate(prompts, params, progress=False)]
        awake: list[int] = []
        for _ in range(CYCLES):
            before = used_bytes()
            llm.suspend()
            assert before - used_bytes() > 0.95 * CACHE_GB * (1 << 30)
            llm.resume()
            llm.unpause()
            awake.append(used_bytes())
        assert awake[-1] - awake[1] < 32 * MIB
        results = llm.generate(prompts, params, progress=False)
        assert [result.generated_tokens for result in results] == expected


def test_requests_leave_no_memory_behind(model: Any) -> None:
    """A server that grows by a kilobyte a request dies within a day."""
    config = InferenceConfig(
        buffer_size_gb=CACHE_GB, max_sequence_length=512, max_requests=64, max_tokens=512
    )
    rng = random.Random(2)
    params = SamplingParams(temperature=0.9, num_tokens_to_generate=4, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=NumberTokenizer(SIZE.vocab_size), inference_config=config) as llm:
        used: list[int] = []
        for _ in range(4):
            prompts = [
                [rng.randrange(SIZE.vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(256)
            ]
            llm.generate(prompts, params, progress=False)
            used.append(used_bytes())
    assert used[-1] - used[1] < 32 * MIB
