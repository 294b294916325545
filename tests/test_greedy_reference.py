"""The demo model through the engine: greedy ids equal to Hugging Face's, however the work is cut up.

The reference was made once by transformers, see tests/models/make_reference.py: 24 prompts of 1 to
700 tokens and 64 ids for each, none of them close to a tie.
"""

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.inference.config import InferenceConfig
from msgspec import Struct, convert

from megallm.core_async.messages import EngineStats
from megallm.core_async.sampling_params import SamplingParams
from megallm.sync.llm import MegatronLLM
from tests.engines import expect_balanced

REFERENCE = Path(__file__).parent / "models" / "reference" / "smollm2_greedy.json"
NUM_TOKENS = 64
NUM_ALONE = 24
"""Of a prompt that runs by itself: a step of one row costs almost what one of twelve does."""
BLOCK_SIZE = 16
BYTES_PER_TOKEN = 30 * 3 * (64 + 64) * 4
"""Layers, KV heads, the size of a key and a value, bytes of a float32."""


class Case(Struct):
    """A prompt, and what transformers generates after it."""

    prompt: list[int]
    generated: list[int]


def read_cases() -> list[Case]:
    """Gives all cases, the shortest prompt first."""
    return convert(json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"], list[Case])


CASES = read_cases()
PROMPTS = [case.prompt for case in CASES]
HALVES = pytest.mark.parametrize("cases", [CASES[::2], CASES[1::2]], ids=["one half", "the other"])
"""Every second case and the others: all at once take a busy machine too long for one test."""


@pytest.fixture(scope="module", autouse=True)
def _both_cores() -> Iterator[None]:
    """Computes on two threads where the machine is quiet; on a busy one they would stall each other."""
    before = torch.get_num_threads()
    if (os.cpu_count() or 1) > 1 and os.getloadavg()[0] < 1.5:
        torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@contextmanager
def engine(
    demo_model: tuple[Any, Any], *, num_tokens: int = 8_192, **settings: Any
) -> Generator[MegatronLLM]:  # Any: megatron's model, and fields of many types
    """Runs the demo model with a cache of `num_tokens` tokens; all its blocks are free in the end."""
    model, tokenizer = demo_model
    fields: dict[str, Any] = {
        "block_size_tokens": BLOCK_SIZE,
        "buffer_size_gb": num_tokens * BYTES_PER_TOKEN / (1 << 30),
        "max_sequence_length": 800,
        **settings,
    }
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=InferenceConfig(**fields)) as llm:
        yield llm
        expect_balanced(llm.engine.stats(), num_tokens // BLOCK_SIZE)


@pytest.fixture(scope="class")
def roomy(demo_model: tuple[Any, Any]) -> Iterator[MegatronLLM]:  # Any: megatron's model is untyped
    """Gives an engine with room for everything, which has run once: the first step compiles kernels."""
    with engine(demo_model) as llm:
        llm.generate([PROMPTS[0]], greedy(1))
        yield llm


def greedy(num_tokens: int) -> SamplingParams:
    """Gives greedy parameters that no token ends."""
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, termination_id=-1)


def expect_reference(llm: MegatronLLM, cases: list[Case], num_tokens: int = NUM_TOKENS) -> EngineStats:
    """Runs cases in one call, fails unless every id is transformers', and gives the engine's figures."""
    results = llm.generate([case.prompt for case in cases], greedy(num_tokens))
    differing = {
        len(case.prompt): (result.generated_tokens, case.generated[:num_tokens])
        for case, result in zip(cases, results, strict=True)
        if result.generated_tokens != case.generated[:num_tokens]
    }
    assert not differing, f"by length of prompt, (got, expected): {differing}"
    return llm.engine.stats()


def test_the_reference_is_what_it_should_be() -> None:
    """A reference cut short would let everything below pass."""
    assert len(CASES) == 24
    assert (len(PROMPTS[0]), len(PROMPTS[-1])) == (1, 700)
    assert {len(case.generated) for case in CASES} == {NUM_TOKENS}


class TestRoomForEverything:
    """With one engine, since each has the model laid out anew."""

    @HALVES
    def test_one_batch_of_all(self, roomy: MegatronLLM, cases: list[Case]) -> None:
        """Rows side by side, prefilled together."""
        before = roomy.engine.stats().step
        stats = expect_reference(roomy, cases)
        assert stats.step - before < 2 * NUM_TOKENS, "it ran as a batch"
        assert stats.preemptions == 0

    @pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case.prompt)} tokens")
    def test_a_call_of_its_own(self, roomy: MegatronLLM, case: Case) -> None:
        """One row, from its prompt on."""
        expect_reference(roomy, [case], NUM_ALONE)


@HALVES
def test_a_pool_so_small_that_requests_are_preempted(demo_model: tuple[Any, Any], cases: list[Case]) -> None:
    """Those that lose their blocks compute prompt and output again, and go on where they were."""
    with engine(demo_model, num_tokens=1_200) as llm:
        stats = expect_reference(llm, cases)
        assert stats.preemptions > 0


@HALVES
def test_steps_so_small_that_prompts_are_chunked(demo_model: tuple[Any, Any], cases: list[Case]) -> None:
    """The longest goes in eight pieces, beside rows that decode."""
    with engine(demo_model, max_tokens=96, enable_chunked_prefill=True) as llm:
        stats = expect_reference(llm, cases)
        num_prompt = sum(len(case.prompt) for case in cases)
        assert stats.prefill_tokens == num_prompt
        assert stats.step >= NUM_TOKENS + num_prompt // 96


@HALVES
def test_steps_so_small_that_prompts_wait(demo_model: tuple[Any, Any], cases: list[Case]) -> None:
    """Unsplit, each waits for a step that has room for all of it."""
    with engine(demo_model, max_tokens=300) as llm:
        stats = expect_reference(llm, cases)
        assert stats.step >= NUM_TOKENS + sum(len(case.prompt) for case in cases) // 300
