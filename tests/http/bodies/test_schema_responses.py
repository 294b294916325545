"""The body of a responses request, and what of its answer is there even where it says nothing."""

from typing import Any

import msgspec
import pytest

from megallm.http.bodies.schema_responses import Event, ResponseObject, ResponsesRequest


def decode(body: dict[str, Any]) -> ResponsesRequest:  # Any: what JSON holds
    """Gives the request of a body."""
    return msgspec.json.decode(msgspec.json.encode(body), type=ResponsesRequest)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"input": []},
        {"input": [{"role": "user", "content": "a"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        {"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"input": "a", "tool_choice": "auto"},
        {"input": "a", "tool_choice": {"type": "function", "name": "f"}},
        {"input": "a", "temperature": None, "max_output_tokens": None, "tools": None, "metadata": None},
        {"input": "a", "seed": 1, "top_k": 5, "repetition_penalty": 1.1},
    ],
)
def test_what_clients_send_is_read(body: dict[str, Any]) -> None:
    """Null counts as absent, and what peers add to requests works here as well."""
    assert decode(body).input == decode({"input": body["input"]}).input


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": 1},
        {"input": "a", "temperature": -1},
        {"input": "a", "max_output_tokens": "many"},
        {"input": [{"role": "robot", "content": "a"}]},
        {"input": "a", "text": {"format": {"type": "yaml"}}},
    ],
)
def test_what_is_of_another_shape_is_refused(body: dict[str, Any]) -> None:
    """A mistake should be told where it was made, not in an answer nobody wanted."""
    with pytest.raises(msgspec.ValidationError):
        decode(body)


def test_a_response_has_each_field_that_clients_read() -> None:
    """Clients fail on an absent field that they need, even where it could only be null."""
    response = ResponseObject(id="resp_1", created_at=1, model="m", temperature=1.0, top_p=1.0)
    written = msgspec.json.decode(msgspec.json.encode(response), type=dict[str, Any])
    assert written["object"] == "response"
    assert written["text"]["format"] == {"type": "text"}
    assert {"error", "incomplete_details", "usage", "tools", "tool_choice", "metadata"} <= written.keys()


def test_an_event_has_no_fields_of_other_events() -> None:
    """A client that knows each event's shape would refuse them."""
    assert msgspec.json.encode(Event(type="x", sequence_number=3)) == b'{"type":"x","sequence_number":3}'
