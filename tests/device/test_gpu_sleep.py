"""On a GPU: suspend gives memory back to the driver, and nothing is lost over many cycles and requests."""

import random
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode, PrefixCachingEvictionPolicy

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


def test_a_prefix_hit_after_a_sleep_gives_the_tokens_it_gave_before(model: Any) -> None:
    """Only blocks that hold something are copied, in chunks, and each must come back to where it was."""
    config = InferenceConfig(
        kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        block_size_tokens=32,
        buffer_size_gb=CACHE_GB,
        max_sequence_length=512,
        max_requests=16,
        max_tokens=512,
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(SIZE.vocab_size) for _ in range(130 + 20 * place)] for place in range(16)]
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=NumberTokenizer(SIZE.vocab_size), inference_config=config) as llm:

        def answers() -> list[tuple[int, list[int]]]:
            results = llm.generate(prompts, params, progress=False)
            return [(result.num_cached_tokens, list(result.generated_tokens)) for result in results]

        assert {num_cached for num_cached, _ in answers()} == {0}
        expected = answers()
        assert [num_cached for num_cached, _ in expected] == [
            (len(prompt) - 1) // 32 * 32 for prompt in prompts
        ]
        for _ in range(3):
            llm.suspend()
            llm.resume()
            llm.unpause()
            assert answers() == expected


def test_a_request_that_is_frozen_through_a_sleep_goes_on_where_it_was(model: Any) -> None:
    """Its blocks are held, and found by no prefix; the last of them is half full."""
    config = InferenceConfig(
        kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
        block_size_tokens=32,
        buffer_size_gb=CACHE_GB,
        max_sequence_length=2048,
        max_requests=4,
        max_tokens=256,
    )
    prompt = [random.Random(4).randrange(SIZE.vocab_size) for _ in range(70)]
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=1500, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=NumberTokenizer(SIZE.vocab_size), inference_config=config) as llm:
        (expected,) = llm.generate([prompt], params, progress=False)
        stream = iter(llm.stream(prompt, params))
        tokens = list(next(stream).token_ids)
        llm.suspend()
        assert llm.engine.stats().running == 1, "it ended before it could be frozen"
        llm.resume()
        llm.unpause()
        for delta in stream:
            tokens += delta.token_ids
    assert tokens == expected.generated_tokens


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
