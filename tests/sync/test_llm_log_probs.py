"""Log-probabilities through the sync facade: those of the unmodified model, however the work is cut up."""

from typing import Any

import pytest
import torch

from tests.device.models import plain_logits
from tests.fakes import FakeTokenizer
from tests.small_llm import expected, greedy, settings, shared_model, sync_llm

PROMPTS = [[5], [5, 6, 7], list(range(40)), [9] * 17]
TOLERANCE = 1e-4


def log_probs_of(tokens: list[int]) -> torch.Tensor:
    """Gives `[tokens - 1, vocab]`: what the model thinks of every token after each, but the last."""
    return plain_logits(shared_model(), tokens)[:-1].log_softmax(-1)


def scores_of(tokens: list[int]) -> list[float]:
    """Gives the log-probability of each token after the first."""
    return [float(row[token]) for row, token in zip(log_probs_of(tokens), tokens[1:], strict=True)]


CONFIGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prompts in chunks": {"max_tokens": 16, "enable_chunked_prefill": True},
    "requests preempted": {"num_blocks": 24, "max_sequence_length": 80},
}


@pytest.mark.parametrize("cut", list(CONFIGS))
def test_texts_are_scored_as_the_model_would(cut: str) -> None:
    """In one pass, and nothing is generated."""
    with sync_llm(config=settings(**CONFIGS[cut])) as llm:
        for prompt, result in zip(PROMPTS, llm.score(PROMPTS), strict=True):
            assert result.prompt_log_probs == pytest.approx(scores_of(prompt), abs=TOLERANCE)
            assert result.generated_tokens == []
            assert not result.failed()


@pytest.mark.parametrize("cut", list(CONFIGS))
def test_generated_tokens_have_the_models_log_probs(cut: str) -> None:
    """One for each, and one for each prompt token after the first."""
    with sync_llm(config=settings(**CONFIGS[cut])) as llm:
        results: list[Any] = llm.generate(PROMPTS, greedy(12, return_log_probs=True))
        for prompt, result in zip(PROMPTS, results, strict=True):
            whole = prompt + expected(prompt, 12)
            assert result.generated_tokens == whole[len(prompt) :]
            got = [*result.prompt_log_probs, *result.generated_log_probs]
            assert got == pytest.approx(scores_of(whole), abs=TOLERANCE)
            assert len(result.generated_log_probs) == 12
        assert (llm.engine.stats().preemptions > 0) == (cut == "requests preempted")


def test_what_nobody_asked_for_is_not_there() -> None:
    """Beside a neighbour who did ask."""
    asks: list[Any] = [greedy(3), greedy(3, return_log_probs=True, skip_prompt_log_probs=True)]
    with sync_llm() as llm:
        silent, asked = llm.generate([[5, 6], [5, 6]], asks)
        assert (silent.prompt_log_probs, silent.generated_log_probs) == (None, None)
        assert not asked.prompt_log_probs
        assert asked.generated_log_probs is not None
        assert len(asked.generated_log_probs) == 3


def test_the_likeliest_rivals_are_named_by_their_text() -> None:
    """The chosen one of greedy decoding is the first of them."""
    with sync_llm() as llm:
        (result,) = llm.generate([[5, 6, 7]], greedy(4, return_log_probs=True, top_n_logprobs=3))
        tops = result.generated_top_n_logprobs
        assert tops is not None
        whole = [5, 6, 7, *expected([5, 6, 7], 4)]
        for place, top in enumerate(tops):
            best = log_probs_of(whole)[2 + place].topk(3)
            assert list(top) == [FakeTokenizer().detokenize([int(token)]) for token in best.indices]
            assert list(top.values()) == pytest.approx([float(value) for value in best.values], abs=TOLERANCE)
        prompt_tops: Any = result.prompt_top_n_logprobs
        assert len(prompt_tops) == 2


def test_a_stream_carries_its_log_probs() -> None:
    """One a token, in the delta that has the token."""
    with sync_llm() as llm:
        deltas = list(llm.stream([5, 6, 7], greedy(8, return_log_probs=True, top_n_logprobs=2)))
        got = [log_prob for delta in deltas for log_prob in delta.log_probs or []]
        assert got == pytest.approx(scores_of([5, 6, 7, *expected([5, 6, 7], 8)])[2:], abs=TOLERANCE)
        assert all(len(delta.top_n_logprobs or []) == len(delta.token_ids) for delta in deltas)
