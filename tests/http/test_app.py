"""The app as its clients use it: every route with and without /v1, and the openai client."""

from typing import Any

import openai
import pytest

from megallm.http.service import AppSettings
from tests.http.serving import Served, expected_tokens, serving

pytestmark = pytest.mark.anyio

leaves_generators = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""The client leaves its own generators to the garbage collector, which trio warns of."""

MESSAGES: Any = [{"role": "user", "content": "hi"}]  # Any: the client types each field
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def client_of(served: Served) -> openai.AsyncOpenAI:
    """Gives the openai client, whose requests go to the app."""
    inside: Any = served.client  # Any: the client wants a package's own httpx, and does with this one
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=inside, max_retries=0)


class Point(openai.BaseModel):
    """What a caller wants parsed."""

    x: int


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_routes_have_two_names(prefix: str) -> None:
    """Upstream's clients leave /v1 out."""
    async with serving() as served:
        await served.json(f"{prefix}/completions", {"prompt": "a", "max_tokens": 1})
        await served.json(f"{prefix}/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        await served.json(f"{prefix}/tokenize", {"prompt": "a"})
        await served.json(f"{prefix}/responses", {"input": "a", "max_output_tokens": 1})
        for path in ("/models", "/health"):
            assert (await served.client.get(prefix + path)).status_code == 200


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    """It is one file of the package."""
    async with serving() as served:
        response = await served.client.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"


async def test_any_content_type_is_json() -> None:
    """Upstream takes it so for completions, and answers 500 for chat."""
    async with serving() as served:
        for path, body in (("completions", b'{"prompt": "a"}'), ("chat/completions", b'{"messages": []}')):
            response = await served.post(f"/v1/{path}", body, content_type="text/plain")
            assert response.status_code in (200, 400)
            assert response.headers["content-type"] == "application/json"


@leaves_generators
async def test_the_openai_client_reads_completions_and_chats() -> None:
    """Whole and streamed."""
    async with serving() as served:
        client = client_of(served)
        assert [model.id async for model in client.models.list()] == ["fake"]
        completion = await client.completions.create(
            model="fake", prompt="hello", max_tokens=3, temperature=0
        )
        assert completion.choices[0].text == served.tokenizer.detokenize(expected_tokens(b"hello", 3))
        chat = await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=1
        )
        text = chat.choices[0].message.content
        assert text == served.tokenizer.detokenize(expected_tokens(served.prompt_of(*MESSAGES), 3))
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 3
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=3, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


async def test_the_openai_client_parses_a_model_and_a_tool_call() -> None:
    """`parse` sends a schema and reads the text as an object of it."""
    async with serving(settings=AppSettings(model_name="fake", parsers=("hermes",))) as served:
        client = client_of(served)
        served.script.say(served.prompt_of(*MESSAGES), '{"x": 3}')
        parsed = await client.chat.completions.parse(
            model="fake", messages=MESSAGES, temperature=0, response_format=Point
        )
        assert parsed.choices[0].message.parsed == Point(x=3)
        first = await served.json(
            "/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 0}
        )
        prompt = first["choices"][0]["message"]["prompt_token_ids"]
        served.script.say(prompt, '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>')
        called = await client.chat.completions.create(
            model="fake", messages=MESSAGES, temperature=0, tools=TOOLS
        )
        calls: Any = called.choices[0].message.tool_calls  # Any: of several kinds
        assert (called.choices[0].finish_reason, calls[0].function.name) == ("tool_calls", "look")


@leaves_generators
async def test_an_error_in_a_stream_reaches_the_openai_client() -> None:
    """It raises instead of ending as if all was said."""
    async with serving(checks_idle=False) as served:
        client = client_of(served)
        served.runner.before_launch = lambda plan: served.traffic.cut() if plan.step > 2 else None

        async def read() -> None:
            stream = await client.completions.create(model="fake", prompt="a", max_tokens=100, stream=True)
            async for _ in stream:
                pass

        with pytest.raises(openai.APIError, match="stopping"):
            await read()
