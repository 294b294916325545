"""POST /v1/chat/completions over a real engine with the fake model."""

import itertools
import json
from typing import Any

import pytest

from megallm.http.service import AppSettings
from tests.fakes import log_prob
from tests.http.serving import Served, expected_tokens, serving

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
PARSERS = AppSettings(model_name="fake", parsers=("hermes",))


async def test_a_conversation_gets_the_models_answer() -> None:
    """The template makes the prompt, and the message carries the exact tokens of both."""
    async with serving() as served:
        reply = await served.json(URL, {"messages": [USER], "max_tokens": 5, **GREEDY})
        prompt = served.prompt_of(USER)
        (choice,) = reply["choices"]
        message = choice["message"]
        assert message["role"] == "assistant"
        assert message["content"] == served.tokenizer.detokenize(expected_tokens(prompt, 5))
        assert message["prompt_token_ids"] == prompt
        assert message["generation_token_ids"] == expected_tokens(prompt, 5)
        assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
        assert reply["object"] == "chat.completion"
        assert reply["usage"]["prompt_tokens"] == len(prompt)


async def test_max_completion_tokens_wins_and_none_fills_the_context() -> None:
    """The newer name is the one a client means when it sends both."""
    async with serving() as served:
        body = {"messages": [USER], **GREEDY, "max_tokens": 9, "max_completion_tokens": 2}
        assert (await served.json(URL, body))["usage"]["completion_tokens"] == 2
        reply = await served.json(URL, {"messages": [USER], **GREEDY})
        assert reply["usage"]["total_tokens"] == served.engine.config.max_sequence_length


async def test_content_parts_and_developers_are_what_the_template_knows() -> None:
    """Templates know text and the system role."""
    async with serving() as served:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        body = {"messages": [{"role": "developer", "content": parts}, USER], "max_tokens": 1}
        (choice,) = (await served.json(URL, body))["choices"]
        assert choice["message"]["prompt_token_ids"] == served.prompt_of(
            {"role": "system", "content": "a\nb"}, USER
        )


async def test_log_probs_carry_bytes_and_rivals() -> None:
    """One object a token; chosen and rivals come from one tensor, so they compare exactly."""
    async with serving() as served:
        body = {"messages": [USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **GREEDY}
        (choice,) = (await served.json(URL, body))["choices"]
        prompt = served.prompt_of(USER)
        tokens = expected_tokens(prompt, 3)
        entries = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in entries] == [[token] for token in tokens]
        assert [entry["logprob"] for entry in entries] == [
            log_prob([*prompt, *tokens[:at]], tokens[at]) for at in range(3)
        ]
        assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]
        body = {**body, "top_logprobs": None, "skip_prompt_log_probs": False}
        (choice,) = (await served.json(URL, body))["choices"]
        assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]
        assert len(choice["message"]["prompt_log_probs"]) == len(prompt) - 1


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 5},
        {"max_tokens": 5, "n": 3},
        {"max_tokens": 0},
        {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "streaming_interval": 3},
        {"max_tokens": 5, "return_token_ids": True, "n": 2},
    ],
)
async def test_a_stream_joined_is_the_whole(body: dict[str, object]) -> None:
    """Whatever is asked for: the role first, the reason last, and the same text between them."""
    async with serving() as served:
        body = {"messages": [USER], **body, **GREEDY}
        whole = await served.json(URL, body)
        events = await served.events(URL, body)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        assert all("usage" not in event for event in events)
        for choice in whole["choices"]:
            expect_same(choice, [event["choices"][0] for event in events], body)


def expect_same(choice: dict[str, Any], all_chunks: list[dict[str, Any]], body: dict[str, object]) -> None:
    """Fails unless the chunks of a choice, joined, are the choice."""
    chunks = [chunk for chunk in all_chunks if chunk["index"] == choice["index"]]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"]
    assert chunks[-1]["generation_token_ids"] == choice["message"]["generation_token_ids"]
    if body.get("logprobs"):
        parts = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert list(itertools.chain.from_iterable(parts)) == choice["logprobs"]["content"]
    if body.get("return_token_ids"):
        ids = [chunk.get("token_ids", []) for chunk in chunks]
        assert list(itertools.chain.from_iterable(ids)) == choice["token_ids"]


async def test_a_tool_call_is_parsed_whole_and_streamed() -> None:
    """A call the model wrote as text becomes a call of the protocol, with its reason."""
    async with serving(settings=PARSERS) as served:
        body = {"messages": [USER], "tools": [TOOL], "temperature": 0}
        prompt = await prompt_tokens(served, body)
        served.script.say(prompt, CALL)
        (choice,) = (await served.json(URL, body))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"]) == {"x": 1}
        chunks = [event["choices"][0] for event in await served.events(URL, body)]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
        assert "".join(part["function"].get("name", "") for part in parts) == "look"
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"x": 1}
        assert (chunks[-1]["finish_reason"], parts[0]["type"]) == ("tool_calls", "function")


async def test_with_tool_choice_none_the_model_hears_of_no_tool() -> None:
    """Its answer is text, whatever it looks like."""
    async with serving(settings=PARSERS) as served:
        body = {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "temperature": 0}
        prompt = served.prompt_of(USER)
        assert await prompt_tokens(served, body) == prompt
        served.script.say(prompt, CALL)
        (choice,) = (await served.json(URL, body))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_a_named_tools_output_is_its_arguments() -> None:
    """The output is held to the tool's schema, so it needs no parser; the reason stays as it is."""
    async with serving() as served:
        named = {"type": "function", "function": {"name": "look"}}
        body = {"messages": [USER], "tools": [TOOL], "tool_choice": named, "temperature": 0, "max_tokens": 20}
        served.script.say(await prompt_tokens(served, body), '{"x": 7}')
        (choice,) = (await served.json(URL, body))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"x": 7})
        assert choice["finish_reason"] == "stop"
        setups = [setup for plan in served.runner.plans for setup in plan.new_rows]
        assert "integer" in setups[-1].sampling.grammar


async def test_a_required_call_is_one_of_the_tools() -> None:
    """The output is an array of calls, given once it is whole."""
    async with serving() as served:
        body = {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 60,
        }
        served.script.say(await prompt_tokens(served, body), '[{"name": "look", "arguments": {"x": 7}}]')
        (choice,) = (await served.json(URL, body))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        chunks = [event["choices"][0] for event in await served.events(URL, body)]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
        assert [part["function"].get("name") for part in parts] == ["look", None]


async def test_an_earlier_answer_keeps_the_tokens_it_was_made_of() -> None:
    """Text tokenised again may give other tokens, which spoils a cached prefix and a trainer's data."""
    async with serving() as served:
        (first,) = (await served.json(URL, {"messages": [USER], "max_tokens": 4, **GREEDY}))["choices"]
        message = first["message"]
        exact = [ord(letter) for letter in "abc"]  # which the tokenizer writes as one token
        answer = {"role": "assistant", "content": "abc", "prompt_token_ids": message["prompt_token_ids"]}
        messages = [USER, {**answer, "generation_token_ids": exact}, {"role": "user", "content": "more"}]
        rendered = served.prompt_of(USER, {"role": "assistant", "content": "abc"}, messages[-1])
        prompt = await prompt_tokens(served, {"messages": messages})
        tail = rendered[len(rendered) - rendered[::-1].index(256, rendered[::-1].index(256) + 1) - 1 :]
        assert prompt == [*message["prompt_token_ids"], *exact, *tail]
        assert (
            await prompt_tokens(served, {"messages": messages, "prevent_retokenization": False}) == rendered
        )


async def test_a_call_streams_its_answer_after_its_own_last_message() -> None:
    """`continue_final_message` lets a client begin the answer."""
    async with serving() as served:
        messages = [USER, {"role": "assistant", "content": "so far"}]
        prompt = await prompt_tokens(served, {"messages": messages, "continue_final_message": True})
        assert served.tokenizer.detokenize(prompt).endswith("assistant:so far")


async def prompt_tokens(served: Served, body: dict[str, Any]) -> list[int]:
    """Gives the prompt that a request has, as the message reports it."""
    plain = {key: value for key, value in body.items() if key != "tool_choice" or value == "none"}
    reply = await served.json(URL, {**plain, "max_tokens": 0})
    return reply["choices"][0]["message"]["prompt_token_ids"]
