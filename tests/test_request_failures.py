"""What goes wrong with one request is data in its result, and nothing to its neighbours."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import anyio
import pytest
import torch
from megatron.core.inference.inference_request import DynamicInferenceEventType, Status

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from megallm.core_async.result import Result
from tests.engines import Rig, engine_config, fake_runner
from tests.fakes import FakeTokenizer
from tests.small_llm import expected, greedy, hosted_llm, new_model, settings, sync_llm, tokens_of

BAD = expected([7], 8)[3]
"""A token that the output of [7] holds."""
GOOD_PROMPTS = [prompt for prompt in ([number] for number in range(96)) if BAD not in expected(prompt, 8)][:3]
PROMPTS = [GOOD_PROMPTS[0], [7], *GOOD_PROMPTS[1:]]


class Picky(FakeTokenizer):
    """Can't take an é, and can't give the text of one token."""

    def tokenize(self, text: str) -> list[int]:
        """Refuses as Hugging Face's do for what is no UTF-8."""
        text.replace("é", "\ud800").encode()
        return super().tokenize(text)

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Refuses as a model's padded vocabulary makes one do."""
        if BAD in tokens:
            raise IndexError(f"piece id {BAD} is out of range")
        return super().detokenize(tokens, skip_special_tokens=skip_special_tokens)


def failure_of(result: Result) -> Exception:
    """Gives why a result failed, as its events say."""
    assert (result.status, result.finish_reason) == (Status.FAILED, "error")
    (payload,) = [
        event.payload for event in result.events if event.type is DynamicInferenceEventType.ERROR_NONTRANSIENT
    ]
    assert isinstance(payload, Exception)
    return payload


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_words": ["~never~"]},
        {"return_log_probs": True, "top_n_logprobs": 2},
        {"return_segments": True},
    ],
    ids=str,
)
def test_a_text_that_can_not_be_made_fails_its_request_alone(fields: dict[str, Any]) -> None:
    """Upstream's engine dies of it, and every other caller's requests with it."""
    with sync_llm(tokenizer=Picky()) as llm:
        results = llm.generate(PROMPTS, greedy(8, **fields))
        assert [result.failed() for result in results] == [False, True, False, False]
        failure = failure_of(results[1])
        assert isinstance(failure, RequestFailedError)
        assert f"IndexError: piece id {BAD} is out of range" in str(failure)
        good = [results[0], *results[2:]]
        assert tokens_of(good) == [expected(prompt, 8) for prompt in GOOD_PROMPTS]


def test_a_failure_shows_at_the_token_and_frees_its_blocks() -> None:
    """A stream says what it has and why there is no more; the request does not run on to its budget."""
    with sync_llm(tokenizer=Picky()) as llm:
        deltas = list(llm.stream([7], greedy(100)))
        assert deltas[-1].finish_reason == "error"
        assert "IndexError" in str(deltas[-1].stop_reason)
        before = expected([7], 8)[:3]
        assert "".join(delta.text for delta in deltas) == FakeTokenizer().detokenize(before)
        assert llm.engine.stats().step < 20


def test_a_prompt_that_can_not_be_tokenised_fails_alone() -> None:
    """Half a surrogate pair in one line of thousands; one that came in ids needs no text."""
    with sync_llm(tokenizer=Picky()) as llm:
        good, failed, other = llm.generate(["A", "caf\xe9", "B"], greedy(1))
        failure = failure_of(failed)
        assert isinstance(failure, InvalidRequestError)
        assert "the tokenizer can't take the prompt: UnicodeEncodeError" in str(failure)
        assert tokens_of([good, other]) == [expected("A", 1), expected("B", 1)]
        (unreadable,) = llm.generate([[BAD]], greedy(1))
        assert unreadable.prompt is None
        assert unreadable.generated_tokens == expected([BAD], 1)
        with pytest.raises(InvalidRequestError, match="UnicodeEncodeError"):
            llm.stream("caf\xe9")


@pytest.mark.anyio
async def test_broken_logits_fail_their_request_alone() -> None:
    """In the middle of an output too: what came before is kept, the token that means nothing is not."""
    model = new_model()
    with torch.no_grad():
        model.embedding.word_embeddings.weight[BAD] = torch.nan
    async with hosted_llm(model=model, config=settings(num_blocks=40)) as llm:
        for _ in range(3):  # others get the blocks that are full of NaN
            results: Any = await llm.generate(PROMPTS, greedy(8))
            assert [result.failed() for result in results] == [False, True, False, False]
            assert isinstance(failure_of(results[1]), RequestFailedError)
            assert "no finite best value" in str(results[1].stop_reason)
            assert results[1].generated_tokens == expected([7], 8)[:4]
            good = [results[0], *results[2:]]
            assert tokens_of(good) == [expected(prompt, 8) for prompt in GOOD_PROMPTS]


@pytest.mark.anyio
async def test_broken_numbers_do_not_stay_in_the_prefix_cache() -> None:
    """A fault of the moment is over when it is over: asked again, the prompt computes its blocks anew."""
    model = new_model()
    config = settings(num_blocks=40, enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    prompt = [BAD, *range(1, 14)]
    async with hosted_llm(model=model, config=config) as llm:
        weights = model.embedding.word_embeddings.weight
        good = weights[BAD].clone()
        with torch.no_grad():
            weights[BAD] = torch.nan
            failed: Any = await llm.generate(prompt, greedy(4))
            weights[BAD] = good
        assert failed.failed()
        first: Any = await llm.generate(prompt, greedy(4))
        again: Any = await llm.generate(prompt, greedy(4))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 12)
        assert first.generated_tokens == again.generated_tokens == expected(prompt, 4)
        await llm.set_generation_epoch(1)  # forgets the blocks: leaving checks that all are free


@pytest.mark.anyio
async def test_a_failure_nobody_reckoned_with_ends_the_engine_and_leaves_no_reader_waiting() -> None:
    """At a request's last word too, when the engine has done with it."""

    class Broken(FakeTokenizer):
        def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            raise IndexError("a bug")

    config = engine_config()
    for is_streamed in (False, True):
        rig = Rig(Engine(config, fake_runner(config), Broken()), fake_runner(config))
        async with anyio.create_task_group() as tasks:
            await tasks.start(rig.engine.run)
            outbox = await rig.engine.submit([rig.request([1], 1, is_streamed=is_streamed)])
            with (
                closing(outbox),
                pytest.raises(EngineDeadError, match="IndexError: a bug"),
                anyio.fail_after(10),
            ):
                await outbox.take()
