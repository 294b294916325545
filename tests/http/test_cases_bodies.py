"""Faults that public trackers are full of, in how bodies are read: nulls, types, unknown fields."""

from typing import Any

import openai
import pytest
from msgspec import structs

from tests.http.serving import BosTokenizer, ChatTokenizer, serving, serving_config

pytestmark = pytest.mark.anyio

C, H = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, object]] = {C: {"prompt": "hi"}, H: {"messages": [USER]}}


@pytest.mark.parametrize("tokenizer", [ChatTokenizer, BosTokenizer], ids=["no bos", "bos"])
async def test_a_chat_prompt_is_exactly_what_its_template_writes(tokenizer: type[ChatTokenizer]) -> None:
    """Seen as two bos: the template writes one, and the tokenizer another."""
    async with serving(tokenizer=tokenizer()) as served:
        reply = await served.json(H, {"messages": [USER], "max_tokens": 1})
        rendered = served.prompt_of(USER)
        assert reply["usage"]["prompt_tokens"] == len(rendered)
        assert reply["choices"][0]["message"]["prompt_token_ids"] == rendered


@pytest.mark.parametrize("url", [C, H])
@pytest.mark.parametrize("value", [-1, 1.5, "8", True, [], {}], ids=repr)
async def test_a_budget_that_is_no_count_is_refused_by_name(url: str, value: object) -> None:
    """Seen as 500, or as a count that nobody asked for."""
    async with serving() as served:
        error = await served.refused(url, {**BODIES[url], "max_tokens": value})
        assert (error["param"], error["type"]) == ("max_tokens", "invalid_request_error")


@pytest.mark.parametrize("url", [C, H])
async def test_a_null_budget_is_none(url: str) -> None:
    """Clients send null for what they leave open."""
    async with serving() as served:
        body = {**BODIES[url], "temperature": 0, "ignore_eos": True}
        absent = (await served.json(url, body))["usage"]
        assert (await served.json(url, {**body, "max_tokens": None}))["usage"] == absent
        zero = await served.json(url, {**body, "max_tokens": 0})
        assert (zero["usage"]["completion_tokens"], zero["choices"][0]["finish_reason"]) == (0, "length")


@pytest.mark.parametrize("url", [C, H])
async def test_what_exceeds_the_context_is_told_with_its_numbers(url: str) -> None:
    """Seen as "must be at least 1, got -186"; trainers match the beginning of the message."""
    async with serving(serving_config(max_sequence_length=64, num_blocks=64)) as served:
        error = await served.refused(url, {**BODIES[url], "max_tokens": 10**9})
        start = "This model's maximum context length was exceeded. Your "
        assert error["message"].startswith(start)
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert "64" in error["message"]
        assert "1000000000" in error["message"]
        long = {"prompt": "x" * 80} if url == C else {"messages": [{"role": "user", "content": "x" * 80}]}
        subject = "prompt" if url == C else "messages"
        for asked in (None, 8):
            error = await served.refused(url, {**long, "max_tokens": asked})
            assert error["message"].startswith(f"{start}{subject} resulted in ")
            assert (error["param"], error["code"]) == (subject, "context_length_exceeded")
            num_tokens = 80 if url == C else len(served.prompt_of({"role": "user", "content": "x" * 80}))
            assert f"resulted in {num_tokens} tokens." in error["message"]


async def test_fields_that_mean_nothing_here_are_accepted() -> None:
    """Seen as 400 for what every client sends, and as "None" in the prompt."""
    async with serving() as served:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}
        messages = [
            {**USER, "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        body = {"messages": messages, "store": False, "user": "u", "metadata": {"a": "b"}, "unheard_of": [1]}
        (choice,) = (await served.json(H, {**body, "max_tokens": 1}))["choices"]
        prompt = served.tokenizer.detokenize(choice["message"]["prompt_token_ids"])
        assert "None" not in prompt
        assert "[look 3]" in prompt


@pytest.mark.parametrize("url", [C, H])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b'"x"', None),
        (b"{bad", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b'{"temperature": NaN}', None),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ],
    ids=repr,
)
async def test_a_wrong_body_is_told_what_is_wrong(
    url: str, body: bytes | dict[str, object], param: str | None
) -> None:
    """Seen as 500, as HTML, or as plain text."""
    async with serving() as served:
        error = await served.refused(url, body if isinstance(body, bytes) else {**BODIES[url], **body})
        assert error["param"] == param


async def test_wrong_methods_and_routes_are_json_too() -> None:
    """The web framework answers these itself, in HTML."""
    async with serving() as served:
        error = await served.refused(H, {"messages": "hi"})
        assert error["param"] == "messages"
        response = await served.client.get(H)
        assert (response.status_code, "POST" in response.headers["allow"]) == (405, True)
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await served.refused("/v1/nothing", {}, 404))["type"] == "not_found_error"


async def test_the_openai_client_raises_what_it_can_read() -> None:
    """A user of the client sees the message, the field and the code."""
    async with serving() as served:
        inside: Any = served.client  # Any: the client wants a package's own httpx, and does with this one
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=inside, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], temperature=-1
            )
        assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


async def test_prompt_log_probs_do_not_depend_on_the_prefix_cache() -> None:
    """Seen as missing or stale log-probs, or a crash, once the prompt was cached."""
    body = {"prompt": "a prompt of quite some length, " * 4, "echo": True, "logprobs": 1, "max_tokens": 0}
    replies: list[object] = []
    for shares in (False, True):
        async with serving(structs.replace(serving_config(), shares_prefixes=shares)) as served:
            for _ in range(2):
                reply = await served.json(C, body)
                replies.append(reply["choices"][0]["logprobs"])
            await served.json(C, {"prompt": body["prompt"], "max_tokens": 2})
            replies.append((await served.json(C, body))["choices"][0]["logprobs"])
    assert all(reply == replies[0] for reply in replies)
