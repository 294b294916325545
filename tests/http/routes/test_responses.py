"""POST /v1/responses, as the openai client reads it; the model's text is the test's."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from megallm.core_async.messages import unpack_ints
from tests.http.scripted import NUM_CACHED, ScriptedPort, scripted_client
from tests.http.small_tokenizer import small_tokenizer

TOOLS: list[Any] = [  # Any: the client types each kind of tool by itself
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
]
CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>'
)

pytestmark = pytest.mark.anyio


def prompt_of(port: ScriptedPort) -> str:
    """Gives the text of the prompt that the engine got last."""
    return small_tokenizer().detokenize(unpack_ints(port.requests[-1].prompt))


async def test_a_text_is_answered_with_a_text() -> None:
    """The shortest use there is."""
    async with scripted_client("he", "llo") as (client, port):
        response = await client.responses.create(model="m", input="hi", max_output_tokens=5, temperature=0.5)
    assert (response.output_text, response.status, response.model) == ("hello", "completed", "m")
    assert (response.temperature, response.max_output_tokens, response.tools) == (0.5, 5, [])
    assert "hi" in prompt_of(port)
    assert (port.requests[0].max_new_tokens, port.requests[0].sampling.temperature) == (5, 0.5)
    usage = response.usage
    assert usage is not None
    num_prompt = len(unpack_ints(port.requests[0].prompt))
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (num_prompt, 2, num_prompt + 2)
    assert usage.input_tokens_details.cached_tokens == NUM_CACHED


async def test_the_conversation_reaches_the_model() -> None:
    """Instructions come before the input, and each message after the one before."""
    async with scripted_client("x") as (client, port):
        await client.responses.create(
            model="m",
            instructions="be brief",
            input=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
        )
    prompt = prompt_of(port)
    assert prompt.index("be brief") < prompt.index("one") < prompt.index("two")


async def events_of(*parts: str, **options: Any) -> tuple[list[str], Response]:  # Any: the client's
    """Streams a response; gives the types of its events and the response that the client makes of them."""
    async with (
        scripted_client(*parts, parsers=("deepseek-r1-reasoning", "hermes")) as (client, _),
        client.responses.stream(model="m", input="hi", **options) as stream,
    ):
        names = [event.type.removeprefix("response.") async for event in stream]
        return names, await stream.get_final_response()


async def test_a_stream_comes_event_by_event() -> None:
    """A reader sees the text grow; the client's own accumulation checks the order of all events."""
    names, response = await events_of("hm</think>", "he", "llo")
    assert names.count("reasoning_text.delta") == 1
    assert names.count("output_text.delta") == 2
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == "completed"
    assert response.output_text == "hello"


@pytest.mark.parametrize(
    "parts",
    [
        ("hello",),
        ("h", "e", "llo"),
        ("hm</th", "ink>he", "llo"),
        ("", "hm</think>", "I call ", CALLS[:30], CALLS[30:]),
        ("hm", CALLS),
        ("",),
    ],
)
async def test_a_stream_adds_up_to_the_whole_response(parts: tuple[str, ...]) -> None:
    """Whether a client streams must not change what it gets."""
    _, streamed = await events_of(*parts, tools=TOOLS)
    async with scripted_client(*parts, parsers=("deepseek-r1-reasoning", "hermes")) as (client, _):
        whole = await client.responses.create(model="m", input="hi", tools=TOOLS)
    assert [comparable(item) for item in streamed.output] == [comparable(item) for item in whole.output]
    assert streamed.usage == whole.usage


def comparable(item: Any) -> dict[str, Any]:  # Any: each item is of a type of its own
    """Gives an item without the ids, which are random, and without what the client's stream adds."""
    named = item.to_dict()
    for part in named.get("content", []):
        part.pop("parsed", None)
    return {key: value for key, value in named.items() if key not in {"id", "call_id", "parsed_arguments"}}


async def test_calls_are_items_that_can_be_answered() -> None:
    """A client runs the function, and sends the items and the result back."""
    async with scripted_client(CALLS, parsers=("hermes",)) as (client, port):
        response = await client.responses.create(model="m", input="hi", tools=TOOLS)
        calls = [item for item in response.output if item.type == "function_call"]
        assert [call.arguments for call in calls] == ['{"a":1}', '{"a":2}']
        one = await client.responses.create(model="m", input="hi", tools=TOOLS, parallel_tool_calls=False)
        assert [item.type for item in one.output] == ["function_call"]
        answered: list[Any] = [item.to_dict() for item in response.output]  # Any: the client's own union
        answered.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "42"})
        await client.responses.create(model="m", input=answered, tools=TOOLS)
    assert "42" in prompt_of(port)


async def test_reasoning_is_counted_apart() -> None:
    """Who pays by the token wants to know what for."""
    async with scripted_client("hmm</think>", "a", parsers=("deepseek-r1-reasoning",)) as (client, _):
        response = await client.responses.create(model="m", input="hi")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2  # as many as there are at most


async def test_a_text_that_was_cut_off_is_incomplete() -> None:
    """It must not pass for a whole answer, streamed or not."""
    async with scripted_client("he", "llo", finish_reason="length") as (client, _):
        response = await client.responses.create(model="m", input="hi")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        assert events[-1].type == "response.incomplete"


async def test_a_schema_holds_the_output() -> None:
    """The client parses the text by the schema that it sent."""

    class Answer(openai.BaseModel):
        number: int

    async with scripted_client('{"number":', " 4}") as (client, port):
        response = await client.responses.parse(model="m", input="hi", text_format=Answer)
    assert response.output_parsed == Answer(number=4)
    grammar = port.requests[0].sampling.grammar
    assert grammar is not None
    assert "number" in str(grammar)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
        ({"input": "x" * 5000}, "input"),
        ({"input": []}, "input"),
    ],
)
async def test_a_mistake_is_named_as_the_client_knows_it(body: dict[str, Any], param: str) -> None:
    """The chat request behind it has other names, which say nothing to a client."""
    async with scripted_client("x") as (client, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post(
                "/responses", cast_to=httpx.Response, body={"model": "m", "input": "hi", **body}
            )
    assert refused.value.param == param
    assert "messages" not in str(refused.value)
    assert "completion" not in str(refused.value)


async def test_a_failure_ends_a_stream_with_an_error() -> None:
    """A stream that just stops would look like a short answer."""
    async with scripted_client("he", "llo", finish_reason="error") as (client, _):
        body = {"model": "m", "input": "hi", "stream": True}
        frames = (await client.post("/responses", cast_to=httpx.Response, body=body)).text.split("\n\n")
        assert frames[-1] == ""
        assert frames[-2].startswith('data: {"error":{"message":')
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="m", input="hi")
