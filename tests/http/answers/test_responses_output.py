"""A response as it grows."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import openai.types.responses as types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.answers.responses_output import ResponseWriter, make_item_id
from megallm.http.bodies.schema_responses import (
    Event,
    InputDetails,
    OutputDetails,
    ResponseObject,
    ResponseUsage,
)
from megallm.http.parsers.pieces import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart

USAGE = ResponseUsage(
    input_tokens=3,
    input_tokens_details=InputDetails(cached_tokens=1),
    output_tokens=4,
    output_tokens_details=OutputDetails(reasoning_tokens=2),
    total_tokens=7,
)

EVENT_TYPES = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
}

TURN: list[Piece] = [
    Reasoning("hm"),
    Reasoning("m"),
    Content("a"),
    Content("b"),
    ToolCallStart(0, "call_0", "f"),
    ToolCallArguments(0, '{"x":'),
    ToolCallArguments(0, "1}"),
    ToolCallStart(1, "call_1", "g"),
    ToolCallArguments(1, "{}"),
]


def numbered_ids() -> Callable[[str], str]:
    """Gives ids that a test knows in advance: "msg_0", "fc_1"."""
    numbers = itertools.count()
    return lambda prefix: f"{prefix}_{next(numbers)}"


def writer() -> ResponseWriter:
    """Gives the writer of an empty response."""
    response = ResponseObject(id="resp", created_at=10, model="m", temperature=1.0, top_p=1.0)
    return ResponseWriter(response, numbered_ids())


def write(pieces: list[Piece], finish_reason: str = "stop") -> tuple[ResponseObject, list[Event]]:
    """Gives a response of these pieces, and its events."""
    each = writer()
    events = [*each.begin(), *each.add(pieces), *each.end(finish_reason, USAGE, 20)]
    return each.response, events


def as_json(value: object) -> Any:  # Any: what JSON holds
    """Gives what a client would decode."""
    return msgspec.json.decode(msgspec.json.encode(value))


def test_a_text_comes_in_the_order_that_clients_expect() -> None:
    """A client builds the message from these events, and fails on a delta of what was not added."""
    _, events = write([Content("a"), Content("b")])
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_each_kind_of_output_is_an_item() -> None:
    """Reasoning, text and calls are told apart by their item."""
    response, _ = write(TURN)
    parsed = types.Response.model_validate(as_json(response))
    assert [item.type for item in parsed.output] == ["reasoning", "message", "function_call", "function_call"]
    assert parsed.output_text == "ab"
    calls = [item for item in parsed.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_0", "f", '{"x":1}'),
        ("call_1", "g", "{}"),
    ]
    assert as_json(response)["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]


def test_every_event_is_what_the_client_declares() -> None:
    """The client itself is lenient, and those who read its types are not."""
    _, events = write(TURN)
    for event in events:
        written = as_json(event)
        parsed = EVENT_TYPES[event.type].model_validate(written)
        assert not parsed.model_extra, event.type
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_event_says_what_was_true_when_it_was_made() -> None:
    """Events may be sent together, long after; one that was changed meanwhile would tell the text twice."""
    _, events = write([Content("a")])
    added, part = as_json(events[2]), as_json(events[3])
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    assert as_json(events[0])["response"]["output"] == []


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("abort", "failed", None),
    ],
)
def test_a_response_says_how_it_ended(finish_reason: str, status: str, reason: str | None) -> None:
    """A text that was cut off must not pass for a whole one."""
    response, events = write([Content("a")], finish_reason)
    parsed = types.Response.model_validate(as_json(response))
    assert parsed.status == status
    assert (parsed.incomplete_details and parsed.incomplete_details.reason) == reason
    assert (parsed.error is not None) == (status == "failed")
    assert parsed.completed_at == (20 if status == "completed" else None)
    assert events[-1].type == f"response.{status}"
    assert as_json(response)["output"][0]["status"] == (
        "completed" if status == "completed" else "incomplete"
    )


def test_a_response_counts_its_tokens() -> None:
    """Clients account by these."""
    usage = types.Response.model_validate(as_json(write([Content("a")])[0])).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 4, 7)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (1, 2)


def test_no_output_is_an_empty_message() -> None:
    """Clients that take the last item's text find one."""
    parsed = types.Response.model_validate(as_json(write([])[0]))
    assert [item.type for item in parsed.output] == ["message"]
    assert parsed.output_text == ""


@given(st.lists(st.sampled_from([Content("a"), Reasoning("b"), ToolCallStart(0, "c", "f")]), max_size=12))
def test_the_events_add_up_to_the_response(pieces: list[Piece]) -> None:
    """A stream must tell what the whole response tells."""
    response, events = write(pieces)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == response.output
    open_ids = set[str]()
    for event in events:
        written = as_json(event)
        if event.type == "response.output_item.added":
            open_ids = {written["item"]["id"]}
        assert event.item_id in {msgspec.UNSET, *open_ids}, "an event of an item that is not open"


def test_ids_are_unique_and_say_what_of() -> None:
    """A client finds an item by its id."""
    assert len({make_item_id("msg") for _ in range(100)}) == 100
    assert make_item_id("fc").startswith("fc_")
