"""The shapes of chat responses and chunks, from pieces of an output."""

import json
from typing import Any

import pytest

from megallm.http.service import AppSettings
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BOTH = AppSettings(model_name="fake", parsers=("deepseek-r1-reasoning", "hermes"))
CALLS = "".join(f'<tool_call>{{"name": "look", "arguments": {{"x": {n}}}}}</tool_call>' for n in (1, 2))


def joined(events: list[dict[str, Any]], part: str) -> str:
    """Gives the joined text of one field of the deltas."""
    return "".join(event["choices"][0]["delta"].get(part, "") for event in events)


@pytest.mark.parametrize("parallel", [None, True, False])
async def test_reasoning_content_and_calls_each_have_their_place(parallel: bool | None) -> None:  # noqa: FBT001 - pytest's
    """In a stream as in the whole; one call alone where a client wants one at a time."""
    async with serving(settings=BOTH) as served:
        body = {"messages": [USER], "tools": [LOOK], "temperature": 0, "parallel_tool_calls": parallel}
        reply = await served.json(URL, {**body, "max_tokens": 0})
        served.script.say(reply["choices"][0]["message"]["prompt_token_ids"], f"<think>hm</think>well{CALLS}")
        (choice,) = (await served.json(URL, body))["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "well")
        numbers = [1] if parallel is False else [1, 2]
        assert [json.loads(call["function"]["arguments"])["x"] for call in message["tool_calls"]] == numbers
        assert choice["finish_reason"] == "tool_calls"
        events = await served.events(URL, body)
        assert (joined(events, "reasoning_content"), joined(events, "content")) == ("hm", "well")
        parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls", [])]
        assert sorted({part["index"] for part in parts}) == list(range(len(numbers)))
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_log_probs_of_text_that_is_held_back_come_with_the_next() -> None:
    """A marker has tokens and no text of its own; none of them is lost."""
    async with serving(settings=BOTH) as served:
        body = {"messages": [USER], "temperature": 0, "logprobs": True, "return_token_ids": True}
        tokens = served.script.say(served.prompt_of(USER), "<think>hm</think>well")
        (choice,) = (await served.json(URL, body))["choices"]
        assert choice["token_ids"] == [*tokens, 256]
        chunks = [event["choices"][0] for event in await served.events(URL, body)]
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == choice["token_ids"]


async def test_an_empty_answer_is_empty_text() -> None:
    """Clients join it without asking."""
    async with serving() as served:
        served.script.say(served.prompt_of(USER), "")
        (choice,) = (await served.json(URL, {"messages": [USER], "temperature": 0}))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        assert choice["stop_reason"] == 256
        events = await served.events(URL, {"messages": [USER], "temperature": 0})
        assert joined(events, "content") == ""
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]
