"""`batch_invariant=True`: a token's log-prob is the same to the bit whatever shares its steps and cache."""

import random
import threading
from typing import Any

from megatron.core.inference.config import PrefixCachingEvictionPolicy

from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.sync.llm import MegatronLLM
from tests.small_llm import make_llm, settings, shared_model, sync_llm, untouched

NUM_REQUESTS = 200
NUM_THREADS = 4


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Gives prompts, half of them with a beginning in common, and different samplings."""
    chosen = random.Random(seed)
    beginnings = [[chosen.randrange(96) for _ in range(length)] for length in (8, 21, 40)]
    made: list[tuple[list[int], SamplingParams]] = []
    for number in range(NUM_REQUESTS):
        beginning = chosen.choice(beginnings) if number % 2 else []
        prompt = beginning + [chosen.randrange(96) for _ in range(chosen.randrange(1, 30))]
        made.append(
            (
                prompt,
                SamplingParams(
                    temperature=chosen.choice([0.0, 0.7, 1.0]),
                    top_p=chosen.choice([0.0, 0.9]),
                    num_tokens_to_generate=chosen.randrange(1, 24),
                    termination_id=-1,
                    return_log_probs=True,
                    skip_prompt_log_probs=number % 5 > 0,
                    seed=number,
                ),
            )
        )
    return made


def in_random_batches(llm: MegatronLLM, wanted: list[tuple[list[int], SamplingParams]]) -> list[Result]:
    """Runs all of them, from several threads, in batches of random sizes."""
    results: list[Result | None] = [None] * len(wanted)

    def call(thread: int) -> None:
        chosen = random.Random(thread)
        places = list(range(thread, len(wanted), NUM_THREADS))
        while places:
            size = chosen.randrange(1, 12)
            batch, places = places[:size], places[size:]
            all_params: list[Any] = [wanted[place][1] for place in batch]
            for place, result in zip(
                batch, llm.generate([wanted[place][0] for place in batch], all_params), strict=True
            ):
                results[place] = result

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


def test_generated_log_probs_are_those_of_scoring_to_the_bit() -> None:
    """With chunks, cache hits and lost blocks: a trainer's ratio of the two is then exactly 1."""
    config = settings(
        num_blocks=36,
        max_requests=12,
        max_tokens=40,
        max_sequence_length=100,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )
    wanted = requests(seed=3)
    with untouched(shared_model()):
        with make_llm(config=config, batch_invariant=True) as llm:
            results = in_random_batches(llm, wanted)
            assert llm.engine.stats().preemptions > 0
        del llm
    assert sum(result.num_cached_tokens > 0 for result in results) > NUM_REQUESTS / 10
    assert sum(result.num_evictions > 0 for result in results) > 5
    with sync_llm(batch_invariant=True) as llm:
        texts = [
            prompt + result.generated_tokens for (prompt, _), result in zip(wanted, results, strict=True)
        ]
        scores = llm.score(texts)
    for (prompt, params), result, score in zip(wanted, results, scores, strict=True):
        expected: Any = score.prompt_log_probs
        assert result.generated_log_probs == expected[len(prompt) - 1 :]
        assert len(result.generated_log_probs or []) == params.num_tokens_to_generate
        if not params.skip_prompt_log_probs:
            assert list(result.prompt_log_probs or []) == expected[: len(prompt) - 1]


def test_the_cpu_kernels_keep_the_promise_by_themselves() -> None:
    """So that it costs nothing there: the switch refuses what can't keep it, and changes no kernel."""
    wanted = requests(seed=4)[:60]
    with sync_llm() as llm:
        results = in_random_batches(llm, wanted)
        texts = [
            prompt + result.generated_tokens for (prompt, _), result in zip(wanted, results, strict=True)
        ]
        scores = llm.score(texts)
    for (prompt, _), result, score in zip(wanted, results, scores, strict=True):
        expected: Any = score.prompt_log_probs
        assert result.generated_log_probs == expected[len(prompt) - 1 :]
