"""The body of a chat request."""

import msgspec
import pytest

from megallm.http.bodies.schema_chat import ChatRequest, NamedTool

USER = {"role": "user", "content": "hi"}


def test_a_conversation_as_clients_send_it() -> None:
    """Nulls, parts, calls and names."""
    body: dict[str, object] = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a", "cache_control": 1}]},
            {**USER, "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "b"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    request = msgspec.convert(body, ChatRequest)
    assert isinstance(request.tool_choice, NamedTool)
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    assert msgspec.convert({"messages": [USER], **nulls}, ChatRequest) == msgspec.convert(
        {"messages": [USER]}, ChatRequest
    )


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "wizard"}]}, r"\$\.messages\[0\]\.role"),
        ({"messages": [{"content": "a"}]}, r"\$\.messages\[0\]"),
        ({"messages": [{**USER, "content": 5}]}, r"\$\.messages\[0\]\.content"),
        ({"messages": [{**USER, "content": [{"text": "a"}]}]}, r"\$\.messages\[0\]\.content\[0\]"),
        ({"messages": [USER], "tool_choice": "maybe"}, r"\$\.tool_choice"),
        ({"messages": [USER], "tools": [{"type": "search"}]}, r"\$\.tools\[0\]"),
        ({"messages": [USER], "logprobs": 5}, r"\$\.logprobs"),
        ({"messages": [USER], "top_logprobs": -1}, r"\$\.top_logprobs"),
    ],
)
def test_a_fault_is_found_by_its_path(body: dict[str, object], path: str) -> None:
    """A conversation may be long."""
    with pytest.raises(msgspec.ValidationError, match=path):
        msgspec.convert(body, ChatRequest)
