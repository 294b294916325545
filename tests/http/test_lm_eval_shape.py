"""The requests of the lm-eval harness, field by field, and the arithmetic that it does on the answers.

Its `local-completions` model sends token ids in batches with `echo`, `logprobs` 1 and `max_tokens` 1,
sums the log-probs of the continuation, and calls it greedy where each equals the likeliest token's.
"""

import itertools
from typing import Any, Final

import httpx
import pytest
from msgspec import structs

from tests.fakes import VOCAB_SIZE, log_prob
from tests.http.sites import LONG
from tests.http.talking import Talk, talking

pytestmark = pytest.mark.anyio

CONTEXTS: Final = [[5, 6, 7], [1], list(range(40)), [9] * 17]
CONTINUATIONS: Final = [[8, 9], [2, 3, 4], [1], [90, 91, 92, 93, 94]]

type Json = dict[str, Any]  # Any: what JSON holds


def scoring(batch: list[list[int]]) -> Json:
    """Gives what the harness sends for log-likelihoods."""
    return {
        "model": "fake",
        "prompt": batch,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


async def asked(talk: Talk, path: str, body: Json) -> Json:
    """Posts as the harness does, which takes nothing but 200."""
    response: httpx.Response = await talk.here.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def parsed(reply: Json, lengths: list[int]) -> list[tuple[float, bool]]:
    """Gives log-likelihood and greediness of each continuation, as the harness computes them."""
    results: list[tuple[float, bool]] = []
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, lengths, strict=True):
        log_probs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(own == max(top.values()) for own, top in zip(log_probs, tops, strict=True))
        results.append((sum(log_probs), is_greedy))
    return results


def expected(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Gives the same from the fake model itself."""
    whole = context + continuation
    places = range(len(context), len(whole))
    own = [log_prob(whole[:place], whole[place]) for place in places]
    best = [max(log_prob(whole[:place], token) for token in range(VOCAB_SIZE)) for place in places]
    return sum(own), own == best


def likeliest_after(context: list[int], num_tokens: int) -> list[int]:
    """Gives a continuation each of whose tokens is as likely as any other."""
    tokens = list(context)
    for _ in range(num_tokens):
        tokens.append(max(range(VOCAB_SIZE), key=lambda token: log_prob(tokens, token)))
    return tokens[len(context) :]


@pytest.mark.parametrize("shares_prefixes", [False, True])
async def test_log_likelihoods_of_a_batch_are_the_models_own(shares_prefixes: bool) -> None:  # noqa: FBT001 - pytest's
    """Equal to the last bit, also when a prompt was cached: greediness is told by equality."""
    config = structs.replace(LONG, shares_prefixes=shares_prefixes)
    async with talking(config=config) as talk:
        pairs = list(itertools.product(CONTEXTS, CONTINUATIONS))
        pairs += [(context, likeliest_after(context, 4)) for context in CONTEXTS]
        for _ in range(2):
            reply = await asked(talk, "/v1/completions", scoring([before + after for before, after in pairs]))
            assert parsed(reply, [len(before) for before, _ in pairs]) == [expected(*each) for each in pairs]
        assert sum(expected(*each)[1] for each in pairs) >= len(CONTEXTS)


async def test_the_answer_has_a_column_a_token_and_none_for_the_first() -> None:
    """The harness cuts by token positions: one too many anywhere gives wrong sums and no error."""
    async with talking() as talk:
        batch = [before + after for before, after in zip(CONTEXTS, CONTINUATIONS, strict=True)]
        reply = await asked(talk, "/v1/completions", scoring(batch))
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(batch)))
        for prompt, choice in zip(batch, reply["choices"], strict=True):
            columns = choice["logprobs"]
            assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
            sizes = {name: len(column) for name, column in columns.items() if column is not None}
            assert set(sizes.values()) == {len(prompt) + 1}, sizes
            assert columns["text_offset"][0] == 0
        assert reply["usage"]["prompt_tokens"] == sum(map(len, batch))


async def test_generations_take_the_harness_fields() -> None:
    """`generate_until`: a batch of prompts, stop strings, a seed; texts come back in order."""
    async with talking() as talk:
        for prompt, answer in (("Q: one", " first\nmore"), ("Q: two", " second\nmore")):
            talk.answer(prompt, answer)
        prompts = [talk.tokenizer.tokenize(each) for each in ("Q: one", "Q: two")]
        body = {
            "model": "fake",
            "max_tokens": 64,
            "temperature": 0,
            "stop": ["rst", "nd", "<|end|>"],
            "seed": 1234,
        }
        reply = await asked(talk, "/v1/completions", body | {"prompt": prompts})
        assert [choice["text"] for choice in reply["choices"]] == [" fi", " seco"]


async def test_chats_take_the_harness_fields() -> None:
    """`local-chat-completions`: typed messages one at a time, the same stop strings and seed."""
    async with talking() as talk:
        talk.reply("Q: one", "first, more")
        body = {
            "messages": [{"role": "user", "content": "Q: one", "type": "text"}],
            "model": "fake",
            "max_tokens": 64,
            "temperature": 0,
            "stop": [",", "<|end|>"],
            "seed": 1234,
        }
        reply = await asked(talk, "/v1/chat/completions", body)
        (choice,) = reply["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("first", "stop")
