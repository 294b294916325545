"""On a GPU: log-probs of generated tokens equal those of scoring the text, to the bit, whatever the batch."""

import random
from typing import Any

import pytest
import torch

from benchmarks.shapes import NumberTokenizer
from megallm import InferenceConfig, MegatronLLM, SamplingParams
from megallm.models.checkpoint import Hyperparameters
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron

pytestmark = pytest.mark.gpu

SIZE = Hyperparameters(
    num_layers=4,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=2048,
    vocab_size=5003,
    max_positions=4096,
    rotary_base=10_000.0,
    norm_epsilon=1e-5,
    is_tied=False,
)
PROMPT_LENGTHS = [1, 3, 17, 64, 100, 129, 255, 300, 513, 700, 5, 40]


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def model(request: pytest.FixtureRequest) -> Any:  # Any: megatron's model is untyped
    """Gives a random model on the GPU."""
    with quiet_megatron():
        from megallm.models.gpt import random_gpt

        ensure_process_groups()
        made = random_gpt(SIZE, dtype=getattr(torch, request.param), device=torch.device("cuda"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter
    return made


@pytest.mark.parametrize("num_graphs", [None, 0], ids=["graphs", "op by op"])
def test_generated_log_probs_equal_the_scored_ones_to_the_bit(model: Any, num_graphs: int | None) -> None:
    """Batches of every size, chunks, prefix hits and preemption, against one pass over the text."""
    rng = random.Random(0)
    shared = [rng.randrange(SIZE.vocab_size) for _ in range(400)]
    prompts = [[rng.randrange(SIZE.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    prompts += [[*shared[:length], length] for length in (50, 200, 333, 400)]
    config = InferenceConfig(
        block_size_tokens=32,
        # room for half of the requests at a time, so that some are preempted
        buffer_size_gb=2048 * _bytes_per_token() / (1 << 30),  # pyright: ignore[reportArgumentType] - a number
        max_requests=16,
        max_tokens=256,
        max_sequence_length=1024,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        num_cuda_graphs=num_graphs,
    )
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        num_tokens_to_generate=90,
        ignore_eos=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
    with MegatronLLM(
        model=model,
        tokenizer=NumberTokenizer(SIZE.vocab_size),
        inference_config=config,
        batch_invariant=True,
        use_coordinator=False,
    ) as llm:
        rollouts = [
            llm.generate(prompts, params, progress=False),
            llm.generate(prompts[::-1], params, progress=False)[::-1],
        ]
        assert llm.engine.stats().preemptions > 0
        texts = [
            prompt + result.generated_tokens for prompt, result in zip(prompts, rollouts[0], strict=True)
        ]
        scores = llm.score(texts)
        alone = llm.score(texts[7:8])
    assert alone[0].prompt_log_probs == scores[7].prompt_log_probs
    for prompt, first, second, scored in zip(prompts, *rollouts, scores, strict=True):
        assert first.generated_tokens == second.generated_tokens
        assert first.generated_log_probs == second.generated_log_probs
        assert first.generated_log_probs == scored.prompt_log_probs[len(prompt) - 1 :]


def _bytes_per_token() -> int:
    return SIZE.num_layers * SIZE.num_kv_heads * SIZE.head_dim * 2 * 2
