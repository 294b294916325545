"""A seeded request gives one and the same text, whoever runs beside it and whatever happens to its blocks."""

import dataclasses
from typing import Any

import pytest

from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from tests.small_llm import expected, settings, sync_llm, tokens_of

PROMPT = "A request with a seed"
SAMPLING: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "top-k and top-p": {"top_k": 40, "top_p": 0.9},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "min-p": {"min_p": 0.02, "temperature": 1.5},
}
OTHERS = [f"request {number} of a crowd" for number in range(31)]


def params(**fields: Any) -> SamplingParams:  # Any: fields of many types
    """Gives parameters that no token ends."""
    chosen: dict[str, Any] = {"temperature": 1.0, "num_tokens_to_generate": 40, "termination_id": -1}
    return SamplingParams(**{**chosen, **fields})


def among_others(place: int, seeded: SamplingParams, **limits: Any) -> Result:  # Any: fields of a config
    """Gives the seeded request's result out of a batch of 32."""
    prompts, all_params = list(OTHERS), [params() for _ in OTHERS]
    prompts.insert(place, PROMPT)
    all_params.insert(place, seeded)
    with sync_llm(config=settings(max_requests=32, **limits)) as llm:
        return llm.generate(prompts, all_params)[place]


@pytest.mark.parametrize("fields", SAMPLING.values(), ids=SAMPLING)
def test_alone_in_a_crowd_and_after_losing_its_blocks_it_is_the_same_text(fields: dict[str, Any]) -> None:
    """An evaluation that is run again, at another hour's load, must give the same numbers."""
    seeded = params(seed=1234, **fields)
    with sync_llm() as llm:
        (alone,) = llm.generate(PROMPT, seeded)
        (other,) = llm.generate(PROMPT, dataclasses.replace(seeded, seed=1235))
    crowded = among_others(0, seeded)
    late = among_others(31, seeded, num_blocks=300)
    assert late.num_evictions > 0
    assert [result.generated_text for result in (crowded, late)] == [alone.generated_text] * 2
    assert tokens_of([crowded, late]) == tokens_of([alone, alone])
    assert alone.generated_tokens not in (other.generated_tokens, expected(PROMPT, 40))
