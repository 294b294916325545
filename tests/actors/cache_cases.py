"""Prompts that a prefix cache shares, run with the cache off and on: not one greedy id may differ.

`python -m tests.actors.cache_cases` runs them on the demo model, as the tests do on a small one.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megallm.core_async.config import GIB
from megallm.core_async.messages import EngineStats
from megallm.core_async.sampling_params import SamplingParams
from megallm.sync.llm import MegatronLLM

type Prompts = list[list[int]]

MOST_BLOCKS = 512


@dataclass(frozen=True)
class CacheCase:
    """Calls, one after the other, and the engine they are made of."""

    name: str
    calls: list[Prompts]
    num_new: int = 4
    num_blocks: int = MOST_BLOCKS
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of InferenceConfig. Any: they are of many types."""
    is_short: bool = False
    """Whether some request has to yield its blocks."""


type MakeLLM = Callable[[int, dict[str, Any]], AbstractContextManager[MegatronLLM]]
"""From a number of blocks and fields of InferenceConfig. Any: fields of many types."""


def cache_cases(block_size: int) -> list[CacheCase]:
    """Gives all cases, for blocks of so many tokens."""
    chunks = [
        CacheCase(
            f"chunks of {size} tokens",
            [mixed(block_size)],
            settings={"max_tokens": size, "max_requests": min(6, size), "enable_chunked_prefill": True},
        )
        for size in (1, 7, 16, 64, 1000)
    ]
    copies = [
        CacheCase(f"32 copies of 3 blocks and {extra:+} tokens", [[stem(3 * block_size + extra)] * 32])
        for extra in (-1, 0, 1)
    ]
    system = stem(6 * block_size)
    tails = [[*system, key, *stem(key % 7, key)] for key in range(64)]
    shared = stem(4 * block_size)
    long, others = stem(6 * block_size), [stem(size * block_size, 50) for size in (8, 11)]
    return [
        *copies,
        CacheCase("a system prompt with 64 tails", [tails], settings={"max_requests": 16}),
        CacheCase(
            "hits after an eviction",
            [[each] for each in (long, long, others[0], long, others[1], long)],
            2,
            12,
        ),
        CacheCase(
            "those who began on a hit yield",
            [[[*shared, 1]], [[*shared, key] for key in range(3)]],
            7 * block_size,
            16,
            {"max_requests": 3},
            is_short=True,
        ),
        *chunks,
    ]


def mixed(block_size: int) -> Prompts:
    """Gives prompts that have beginnings of many lengths in common."""
    return [[*stem(block_size * (key % 4) + key % 3), *stem(key % 5 + 1, key)] for key in range(20)]


def stem(num_tokens: int, first: int = 10) -> list[int]:
    """Gives tokens."""
    return [(first + 3 * place) % 61 for place in range(num_tokens)]


def run_case(case: CacheCase, make_llm: MakeLLM, block_size: int) -> EngineStats:
    """Fails unless the ids are those without a cache; gives the figures with it."""
    ids, stats = zip(
        *[_run(case, make_llm, block_size, caches=caches) for caches in (False, True)], strict=True
    )
    off, on = stats
    assert ids[0] == ids[1], f"{case.name}: {ids[1]}, without a cache {ids[0]}"
    assert (off.prefix_hit_tokens, off.cached_blocks) == (0, 0)
    assert 0 < on.prefix_hit_tokens < on.prefix_query_tokens
    assert on.prefill_tokens < off.prefill_tokens or case.is_short
    assert bool(on.preemptions) == case.is_short
    return on


def _run(
    case: CacheCase, make_llm: MakeLLM, block_size: int, *, caches: bool
) -> tuple[list[list[int]], EngineStats]:
    settings = {
        "enable_prefix_caching": caches,
        "prefix_caching_eviction_policy": "lru",
        "max_sequence_length": min(16, case.num_blocks) * block_size,
        **case.settings,
    }
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=case.num_new, termination_id=-1)
    with make_llm(case.num_blocks, settings) as llm:
        ids = [
            result.generated_tokens
            for prompts in case.calls
            for result in llm.generate([*prompts], params, progress=False)
        ]
        return ids, llm.engine.stats()


def main() -> None:
    """Runs all cases on the demo model."""
    from megatron.core.inference.config import InferenceConfig

    from megallm import load_model

    model, tokenizer = load_model("smollm2-135m")
    block_size, bytes_per_token = 16, 30 * 3 * (64 + 64) * 4

    def make_llm(num_blocks: int, settings: dict[str, Any]) -> MegatronLLM:  # Any: see CacheCase
        size_gb: Any = num_blocks * block_size * bytes_per_token / GIB  # Any: declared int, used as a number
        config = InferenceConfig(block_size_tokens=block_size, buffer_size_gb=size_gb, **settings)
        return MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config)

    for case in cache_cases(block_size):
        stats = run_case(case, make_llm, block_size)
        sys.stdout.write(
            f"{case.name}: equal; {stats.prefix_hit_tokens:,} of {stats.prefix_query_tokens:,} tokens cached,"
            f" {stats.preemptions} preemptions\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
