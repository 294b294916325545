"""The official client, unchanged, against a whole server on loopback: what people will point at it."""

import json
from collections.abc import AsyncIterable
from typing import Any

import anyio
import openai
import pytest
from msgspec import structs
from openai import AsyncOpenAI, BaseModel, OpenAI, Timeout
from openai.types.chat import ChatCompletion

from tests.http.serving import eventually, expected_tokens
from tests.http.sites import ANSWER_S, LONG
from tests.http.talking import KEY, Talk, talking

pytestmark = pytest.mark.anyio

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""On trio the client leaves its generators to the collector, which trio warns of. The one that blocks
streams from a server on either loop."""

HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
CITY = HELLO | {"messages": [{"role": "user", "content": "a city"}]}
# Any: what JSON holds
LOOK: dict[str, Any] = HELLO | {
    "messages": [{"role": "user", "content": "the weather"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"place": {"type": "string"}},
                    "required": ["place"],
                    "additionalProperties": False,
                },
            },
        }
    ],
}
LONG_ANSWER: dict[str, Any] = {
    "prompt": [1, 2],
    "max_tokens": 4000,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


class City(BaseModel):
    """What an answer is parsed as; the client's models are pydantic's."""

    name: str
    people: int


def teach(talk: Talk) -> None:
    """Makes the model say what the tests ask for."""
    talk.answer("Once", " upon a time")
    talk.reply("hi", "hello there")
    talk.reply("a city", '{"name": "Oslo", "people": 700000}')
    talk.reply("the weather", '<tool_call>{"name": "look", "arguments": {"place": "Oslo"}}</tool_call>')


def chats_of(client: AsyncOpenAI | OpenAI) -> Any:  # Any: typed by TypedDicts, which a dict is not
    """Gives the client's chat interface."""
    return client.chat.completions


def texts_of(client: AsyncOpenAI | OpenAI) -> Any:  # Any: the same
    """Gives the client's completions interface."""
    return client.completions


async def drain(stream: AsyncIterable[object]) -> int:
    """Reads a stream to its end; gives the number of its chunks."""
    return len([chunk async for chunk in stream])


async def test_the_client_that_blocks_gets_completions_chats_streams_and_models() -> None:
    """Most scripts use this one."""

    def use(client: OpenAI) -> None:
        completion = client.completions.create(model="fake", prompt="Once", temperature=0)
        assert completion.choices[0].text == " upon a time"
        chunks = list(client.completions.create(model="fake", prompt="Once", temperature=0, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a time"
        chat: ChatCompletion = chats_of(client).create(**HELLO)
        assert chat.choices[0].message.content == "hello there"
        with chats_of(client).stream(**HELLO) as stream:
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.content == "hello there"
        assert client.responses.create(model="fake", input="hi", temperature=0).output_text == "hello there"
        assert [model.id for model in client.models.list()] == ["fake"]

    async with talking() as talk:
        teach(talk)
        await talk.sync(use)


async def test_a_completion_has_text_reason_counts_and_log_probs() -> None:
    """Every field that the client types is there, and typed as it says."""
    async with talking() as talk, talk.client() as client:
        teach(talk)
        completion = await client.completions.create(
            model="fake", prompt=["Once", "Once"], temperature=0, logprobs=2, n=2
        )
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        for choice in completion.choices:
            assert (choice.text, choice.finish_reason) == (" upon a time", "stop")
            columns = choice.logprobs
            assert columns is not None
            assert columns.tokens is not None
            assert "".join(columns.tokens).startswith(" upon a time")
            assert len(columns.token_logprobs or ()) == len(columns.tokens) == len(columns.top_logprobs or ())
        usage = completion.usage
        assert usage is not None
        num_tokens = len(" upon a time") + 1
        assert (usage.prompt_tokens, usage.completion_tokens) == (8, 4 * num_tokens)


@on_asyncio
async def test_a_streamed_chat_is_the_whole_one_in_parts() -> None:
    """The role comes first, the reason last, the counts after it when they were asked for."""
    async with talking() as talk, talk.client() as client:
        teach(talk)
        whole: ChatCompletion = await chats_of(client).create(**HELLO, logprobs=True, top_logprobs=1)
        stream = await chats_of(client).create(
            **HELLO, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert (last.choices, last.usage) == ([], whole.usage)
        choices = [chunk.choices[0] for chunk in chunks]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == "hello there"
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        assert whole.choices[0].logprobs is not None
        assert entries == whole.choices[0].logprobs.content
        assert len({chunk.id for chunk in [*chunks, last]}) == 1


@on_asyncio
async def test_an_answer_is_parsed_as_a_model() -> None:
    """`parse` sends the model's schema as response_format; the fields come back typed."""
    async with talking() as talk, talk.client() as client:
        teach(talk)
        chat = await chats_of(client).parse(**CITY, response_format=City)
        parsed = chat.choices[0].message.parsed
        assert parsed is not None
        assert (parsed.name, parsed.people) == ("Oslo", 700_000)
        async with chats_of(client).stream(**CITY, response_format=City) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed
        response = await client.responses.parse(model="fake", input="a city", temperature=0, text_format=City)
        assert response.output_parsed == parsed


@on_asyncio
async def test_tools_are_called_whole_and_in_parts() -> None:
    """An agent's loop: the call comes, its result goes back, the answer comes."""
    async with talking(parsers=("hermes",)) as talk, talk.client() as client:
        teach(talk)
        chat: ChatCompletion = await chats_of(client).create(**LOOK)
        message = chat.choices[0].message
        calls: Any = message.tool_calls  # Any: a union, of which this is one
        (call,) = calls
        assert chat.choices[0].finish_reason == "tool_calls"
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "Oslo"})
        async with chats_of(client).stream(**LOOK) as stream:
            kinds = [event.type async for event in stream]
            final = (await stream.get_final_completion()).choices[0].message
        assert "tool_calls.function.arguments.delta" in kinds
        (streamed,) = final.tool_calls
        assert json.loads(streamed.function.arguments) == {"place": "Oslo"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        said: Any = [*LOOK["messages"], message, result]  # Any: a union of TypedDicts and models
        again: ChatCompletion = await chats_of(client).create(**(LOOK | {"messages": said, "max_tokens": 3}))
        assert again.choices[0].finish_reason == "length"


@on_asyncio
async def test_responses_come_whole_and_as_events() -> None:
    """The client's newest interface; its stream ends with the whole response."""
    async with talking(parsers=("hermes",)) as talk, talk.client() as client:
        teach(talk)
        whole = await client.responses.create(model="fake", input="hi", temperature=0)
        assert (whole.output_text, whole.status) == ("hello there", "completed")
        async with client.responses.stream(model="fake", input="hi", temperature=0) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert (final.output_text, final.usage) == (whole.output_text, whole.usage)
        tools: Any = [{"type": "function", **LOOK["tools"][0]["function"]}]
        called = await client.responses.create(model="fake", input="the weather", temperature=0, tools=tools)
        (item,) = called.output
        assert item.type == "function_call"
        assert (item.name, json.loads(item.arguments)) == ("look", {"place": "Oslo"})


async def test_every_refusal_is_the_clients_own_error_with_a_text_to_read() -> None:
    """Whoever sees it must know what to change."""
    async with talking(max_body_bytes=2000) as talk, talk.client() as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            await chats_of(client).create(**(HELLO | {"temperature": -1}))
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="served is fake") as unknown:
            await chats_of(client).create(**(HELLO | {"model": "gpt-9"}))
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
            await client.models.retrieve("gpt-9")
        with pytest.raises(openai.NotFoundError, match="no such route"):
            await client.embeddings.create(model="fake", input="x")
        with pytest.raises(openai.APIStatusError, match="longer than the server takes") as long:
            await client.completions.create(model="fake", prompt="x" * 3000)
        assert long.value.status_code == 413
        async with talk.client("another") as other:
            with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer") as denied:
                await other.models.list()
        assert denied.value.code == "invalid_api_key"
        assert KEY not in str(denied.value)


async def test_a_full_waiting_list_is_a_rate_limit() -> None:
    """The client then waits as long as the server says, and tries again."""
    async with talking(config=structs.replace(LONG, max_waiting=1)) as talk, talk.client() as client:
        await talk.here.engine.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.completions.create(model="fake", prompt="Once", max_tokens=1))
            await eventually(lambda: talk.here.engine.stats().waiting == 1)
            with pytest.raises(openai.RateLimitError, match="try again later") as busy:
                await client.completions.create(model="fake", prompt="Once", max_tokens=1)
            assert busy.value.response.headers["retry-after"] == "1"
            await talk.here.engine.unpause()


async def test_a_client_that_times_out_gives_its_request_up() -> None:
    """It has closed the connection by then, and nobody reads the answer."""
    async with talking() as talk, talk.client() as client:
        await talk.here.engine.pause()
        hasty = client.with_options(timeout=Timeout(ANSWER_S, read=0.1))
        with pytest.raises(openai.APITimeoutError):
            await texts_of(hasty).create(model="fake", **LONG_ANSWER)
        await talk.here.engine.unpause()
        await eventually(lambda: not talk.here.engine.stats().running + talk.here.engine.stats().waiting)


@on_asyncio
async def test_a_stream_that_ends_early_raises_what_ended_it() -> None:
    """The status was sent long before; the error comes in the stream."""
    async with talking(step_s=0.001) as talk, talk.client() as client:
        stream = await texts_of(client).create(model="fake", **LONG_ANSWER, stream=True)
        assert (await anext(stream)).choices
        await talk.here.client.post("/abort", json={"abort_all": True})
        with pytest.raises(openai.APIError, match="aborted by an administrator"):
            await drain(stream)


@on_asyncio
async def test_a_stream_that_is_closed_is_given_up() -> None:
    """`break` in a loop over chunks, then `close`, as the client's page says."""
    async with talking(step_s=0.001) as talk, talk.client() as client:
        stream = await texts_of(client).create(model="fake", **LONG_ANSWER, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: not talk.here.engine.stats().running)
        assert talk.here.engine.stats().step < 1000


async def test_many_calls_at_once_each_get_their_own_answer() -> None:
    """One client, 40 tasks, one pool of connections."""
    async with talking() as talk, talk.client() as client:
        answers: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            completion: Any = await texts_of(client).create(
                model="fake",
                prompt=[number, 5],
                max_tokens=20,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            answers[number] = completion.choices[0].generation_token_ids

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(ask, number)
        assert answers == {number: expected_tokens([number, 5], 20) for number in range(40)}
