"""POST /v1/completions over a real engine with the fake model."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.fakes import likeliest, log_prob
from tests.http.serving import BosTokenizer, expected_tokens, serving

pytestmark = pytest.mark.anyio

URL = "/v1/completions"


def flat(lists: Iterable[list[Any]]) -> list[Any]:  # Any: JSON
    """Gives lists joined."""
    return list(itertools.chain.from_iterable(lists))


GREEDY = {"temperature": 0, "ignore_eos": True}


async def test_a_text_gets_the_models_answer() -> None:
    """The whole way: body, tokenizer, engine, text, token ids, counts."""
    async with serving() as served:
        reply = await served.json(URL, {"prompt": "hello", "max_tokens": 5, **GREEDY})
        tokens = expected_tokens(b"hello", 5)
        (choice,) = reply["choices"]
        assert choice["text"] == served.tokenizer.detokenize(tokens)
        assert (choice["generation_token_ids"], choice["prompt_token_ids"]) == (tokens, list(b"hello"))
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        assert reply["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert (reply["object"], reply["model"]) == ("text_completion", "fake")


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], list(b"hello"), [list(b"hello")]], ids=["text", "texts", "ids", "lists"]
)
async def test_every_kind_of_prompt_means_the_same(prompt: object) -> None:
    """The protocol has four."""
    async with serving() as served:
        reply = await served.json(URL, {"prompt": prompt, "max_tokens": 3, **GREEDY})
        assert reply["choices"][0]["generation_token_ids"] == expected_tokens(b"hello", 3)


async def test_choices_of_several_prompts_stand_in_order() -> None:
    """Clients find a prompt's choices by index: prompt times n plus choice."""
    async with serving() as served:
        reply = await served.json(URL, {"prompt": ["xy", "zw"], "n": 2, "max_tokens": 3, **GREEDY})
        got = [(choice["index"], choice["generation_token_ids"]) for choice in reply["choices"]]
        one, other = expected_tokens(b"xy", 3), expected_tokens(b"zw", 3)
        assert got == [(0, one), (1, one), (2, other), (3, other)]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (4, 12)


async def test_the_default_is_sixteen_tokens_or_what_fits() -> None:
    """A default that nobody asked for is no reason to refuse a prompt."""
    async with serving() as served:
        reply = await served.json(URL, {"prompt": "a", **GREEDY})
        assert reply["usage"]["completion_tokens"] == 16
        reply = await served.json(URL, {"prompt": [1] * 510, **GREEDY})
        assert reply["usage"]["completion_tokens"] == 2


async def test_log_probs_of_echoed_prompt_and_answer_come_in_one_list() -> None:
    """What lm-eval reads: nothing for the first token, then one number a token, exact."""
    async with serving() as served:
        body = {"prompt": "hello", "max_tokens": 1, "echo": True, "logprobs": 2, **GREEDY}
        (choice,) = (await served.json(URL, body))["choices"]
        tokens = [*b"hello", *expected_tokens(b"hello", 1)]
        shown = choice["logprobs"]
        assert choice["text"] == served.tokenizer.detokenize(tokens)
        assert shown["tokens"] == [chr(token) for token in tokens]
        assert shown["token_logprobs"] == [None] + [log_prob(tokens[:at], tokens[at]) for at in range(1, 6)]
        assert shown["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert shown["top_logprobs"][0] is None
        for at in range(1, 6):
            best = likeliest(tokens[:at], 2)
            expected = {
                chr(token): value for token, value in [(tokens[at], log_prob(tokens[:at], tokens[at])), *best]
            }
            assert shown["top_logprobs"][at] == expected


async def test_echo_with_no_tokens_to_generate_scores_the_prompt() -> None:
    """The cheapest way to a text's log-probs: one pass, nothing sampled."""
    async with serving() as served:
        body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1, **GREEDY}
        reply = await served.json(URL, body)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert len(choice["logprobs"]["token_logprobs"]) == 5
        assert reply["usage"]["completion_tokens"] == 0
        (choice,) = (await served.json(URL, {**body, "prompt": "h"}))["choices"]
        assert choice["logprobs"]["token_logprobs"] == [None]
        (choice,) = (await served.json(URL, {**body, "logprobs": None}))["choices"]
        assert (choice["text"], choice["logprobs"]) == ("hello", None)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello", "max_tokens": 6},
        {"prompt": ["xy", "zw"], "n": 2, "max_tokens": 4},
        {"prompt": "hello", "max_tokens": 3, "echo": True},
        {"prompt": "hello", "max_tokens": 3, "echo": True, "logprobs": 1},
        {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "hello", "max_tokens": 0, "echo": True},
        {"prompt": "hello", "max_tokens": 0},
        {"prompt": "hello", "max_tokens": 6, "logprobs": 0, "streaming_interval": 4},
        {"prompt": "hello", "max_tokens": 6, "return_token_ids": True},
    ],
)
async def test_a_stream_joined_is_the_whole(body: dict[str, object]) -> None:
    """Text, log-probs, tokens and reasons are the same however they come; null until the last chunk."""
    async with serving() as served:
        body = {**body, **GREEDY}
        whole = await served.json(URL, body)
        events = await served.events(URL, {**body, "stream_options": {"include_usage": True}})
        assert len({event["id"] for event in events}) == 1
        assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole["usage"])
        for choice in whole["choices"]:
            chunks = [
                chunk for event in events for chunk in event["choices"] if chunk["index"] == choice["index"]
            ]
            assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
            assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1]["finish_reason"] == choice["finish_reason"]
            assert chunks[-1]["generation_token_ids"] == choice["generation_token_ids"]
            parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            joined = {key: flat(part[key] for part in parts) for key in parts[0]} if parts else None
            assert joined == choice["logprobs"]
            if "return_token_ids" in body:
                ids = flat(chunk.get("token_ids", []) for chunk in chunks)
                assert ids == choice["token_ids"] == choice["generation_token_ids"]


async def test_a_bos_comes_once_where_the_tokenizer_puts_one() -> None:
    """Two of them spoil a prompt, and so does none."""
    async with serving(tokenizer=BosTokenizer()) as served:
        for prompt in ("ab", "<|start|>ab", "<|start|><|start|>ab"):
            (choice,) = (await served.json(URL, {"prompt": prompt, "max_tokens": 1}))["choices"]
            assert choice["prompt_token_ids"] == [257, *served.tokenizer.tokenize("ab")[1:]]
        body = {"prompt": "ab", "max_tokens": 1, "add_special_tokens": False}
        (choice,) = (await served.json(URL, body))["choices"]
        assert choice["prompt_token_ids"] == served.tokenizer.tokenize("ab")[1:]


async def test_forks_of_a_prompt_differ_by_seed_and_share_its_blocks() -> None:
    """`n` choices cost one prompt; with a seed they are repeatable, and not all the same one."""
    async with serving() as served:
        body = {"prompt": "a long enough prompt", "n": 3, "max_tokens": 1, "seed": 5}
        await served.json(URL, body)
        setups = [setup for plan in served.runner.plans for setup in plan.new_rows]
        assert [setup.sampling.seed for setup in setups] == [5, 6, 7]
        num_computed = sum(len(plan.tokens) // 4 for plan in served.runner.plans)
        assert num_computed < 2 * len("a long enough prompt")
