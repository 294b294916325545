"""A responses request as a chat request."""

import re
from typing import Any

import msgspec
import pytest

from megallm.http.bodies.responses_input import chat_request_of
from megallm.http.bodies.schema import ResponseFormat
from megallm.http.bodies.schema_chat import (
    ChatRequest,
    FunctionCall,
    Message,
    NamedFunction,
    NamedTool,
    ToolCall,
)
from megallm.http.bodies.schema_responses import ResponsesRequest
from megallm.http.errors import RequestError


def chat(**body: Any) -> ChatRequest:  # Any: what JSON holds
    """Gives the chat request of a body; its input is "a" where the test names none."""
    encoded = msgspec.json.encode({"input": "a", **body})
    return chat_request_of(msgspec.json.decode(encoded, type=ResponsesRequest))


def test_a_text_is_what_the_user_says() -> None:
    """The shortest request there is."""
    assert chat().messages == [Message(role="user", content="a")]


def test_instructions_come_first() -> None:
    """They are not part of the conversation that a client keeps."""
    assert chat(instructions="b").messages == [
        Message(role="system", content="b"),
        Message(role="user", content="a"),
    ]


def test_parts_of_a_message_are_joined() -> None:
    """A template takes text."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "c"}, {"type": "message", "role": "user", "content": parts}]
    assert chat(input=items).messages == [
        Message(role="developer", content="c"),
        Message(role="user", content="ab"),
    ]


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    """A client sends the items of an earlier response back; templates know whole messages only."""
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        call,
        call | {"call_id": "y"},
        {"type": "function_call_output", "call_id": "x", "output": "1"},
        {"type": "function_call_output", "call_id": "y", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "content": "u"},
        call,
    ]
    calls = [
        ToolCall(id=id_, type="function", function=FunctionCall(name="f", arguments="{}")) for id_ in "xyx"
    ]
    assert chat(input=items).messages == [
        Message(role="user", content="q"),
        Message(role="assistant", content="a", reasoning_content="t", tool_calls=calls[:2]),
        Message(role="tool", content="1", tool_call_id="x"),
        Message(role="tool", content="2", tool_call_id="y"),
        Message(role="assistant", content="b", reasoning_content="s"),
        Message(role="assistant", content="c"),
        Message(role="assistant", reasoning_content="u", tool_calls=calls[2:]),
    ]


def test_a_schema_is_a_response_format() -> None:
    """Structured output is the same thing under both names."""
    schema = {"type": "object"}
    format_ = chat(text={"format": {"type": "json_schema", "name": "n", "schema": schema}}).response_format
    assert format_ is not None
    assert format_.json_schema is not None
    assert (format_.type, format_.json_schema.schema, format_.json_schema.name) == (
        "json_schema",
        schema,
        "n",
    )
    assert chat(text={"format": {"type": "json_object"}}).response_format == ResponseFormat(
        type="json_object"
    )
    assert chat(text={"format": {"type": "text"}}).response_format == ResponseFormat(type="text")
    assert chat(text={"format": None}).response_format is None


def test_tools_are_functions_with_their_schema() -> None:
    """Here their definition stands in the tool itself."""
    request = chat(
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
    )
    assert request.tools is not None
    (tool,) = request.tools
    assert (tool.function.name, tool.function.description) == ("f", "d")
    assert tool.function.parameters == {"type": "object"}
    assert request.tool_choice == NamedTool(function=NamedFunction(name="f"))
    assert request.parallel_tool_calls is False
    assert chat(tool_choice="required").tool_choice == "required"


def test_the_fields_of_sampling_are_the_same() -> None:
    """What peers add to chat requests is taken here as well."""
    request = chat(temperature=0.5, top_p=0.9, top_k=3, seed=7, stop=["x"], max_output_tokens=9, stream=True)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.9, 3, 7)
    assert (request.stop, request.max_completion_tokens, request.stream) == (["x"], 9, True)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "c"}, "conversation", "send the whole conversation"),
        ({"prompt": {"id": "p"}}, "prompt", "send the text"),
        ({"background": True}, "background", "use stream"),
        ({"top_logprobs": 2}, "top_logprobs", "use /v1/chat/completions"),
        ({"n": 2}, "n", "send several requests"),
        ({"include": ["file_search_call.results"]}, "include[0]", "leave it out"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "function with its name"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call'"),
        ({"input": [{"content": "a"}]}, "input[0].role", "missing"),
        ({"input": [{"type": "function_call"}]}, "input[0].name", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "only text",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    """An option that is ignored in silence changes the answer in silence."""
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        chat(**body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body", [{"background": False}, {"n": 1}, {"store": True}, {"include": ["reasoning.encrypted_content"]}]
)
def test_what_changes_nothing_is_accepted(body: dict[str, Any]) -> None:
    """Clients send these unasked."""
    assert chat(**body).messages == chat().messages
