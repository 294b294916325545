"""A response as it grows: from the pieces of a model's output to objects and events. Pure.

At each time at most one item is open: reasoning, a message or a call. A piece of another kind closes it.
"""

import uuid
from collections.abc import Callable
from typing import Any

from msgspec import structs

from megallm.http.bodies.schema_responses import (
    Event,
    FunctionCallItem,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from megallm.http.parsers.pieces import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart


def make_item_id(prefix: str) -> str:
    """Gives an id that nothing else has: `msg_`, `rs_`, `fc_` or `resp_` and random letters."""
    return f"{prefix}_{uuid.uuid4().hex}"


STATUSES: dict[str, Status] = {"length": "incomplete", "abort": "failed", "error": "failed"}
"""What a response becomes, by why its request ended; `completed` by any other reason."""


class ResponseWriter:
    """Writes one response; `response` is what it is by now. A stream sends all the events, in order."""

    def __init__(self, response: ResponseObject, make_id: Callable[[str], str] = make_item_id) -> None:
        self.response = response
        self._make_id = make_id
        self._num_events = 0
        self._items: list[OutputItem] = []
        """Those that are closed."""
        self._open: OutputItem | None = None
        """As it was when it was opened, so without its text."""
        self._text: list[str] = []
        """Of the open item."""

    def begin(self) -> list[Event]:
        """Gives what a stream begins with."""
        return [self._stage("created"), self._stage("in_progress")]

    def add(self, pieces: list[Piece]) -> list[Event]:
        """Adds to the output."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    if not isinstance(self._open, OutputMessage):
                        events += self._begin_item(_message(self._make_id("msg")))
                    events.append(self._add_text("response.output_text.delta", text, logprobs=[]))
                case Reasoning(text):
                    if not isinstance(self._open, ReasoningItem):
                        events += self._begin_item(_reasoning(self._make_id("rs")))
                    events.append(self._add_text("response.reasoning_text.delta", text))
                case ToolCallStart(_, call_id, name):
                    events += self._begin_item(_call(self._make_id("fc"), call_id, name))
                case ToolCallArguments(_, fragment):
                    assert isinstance(self._open, FunctionCallItem), "arguments, and no call is open"
                    events.append(self._add_text("response.function_call_arguments.delta", fragment))
        return events

    def end(self, finish_reason: str, usage: ResponseUsage, completed_at: int) -> list[Event]:
        """Ends the response as the engine ended the request; one without any output has an empty message."""
        events: list[Event] = []
        if self._open is None and not self._items:
            events += self._begin_item(_message(self._make_id("msg")))
        status = STATUSES.get(finish_reason, "completed")
        events += self._close_item("completed" if status == "completed" else "incomplete")
        self.response = structs.replace(
            self.response,
            status=status,
            usage=usage,
            output=self._items,
            completed_at=completed_at if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            error=ResponseError(code="server_error", message=f"the request ended with {finish_reason!r}")
            if status == "failed"
            else None,
        )
        events.append(self._stage(status))
        return events

    # ---- items ---------------------------------------------------------------------------------

    def _begin_item(self, item: OutputItem) -> list[Event]:
        events = self._close_item("completed")
        self._open = item
        events.append(self._event("response.output_item.added", item=item))
        if not isinstance(item, FunctionCallItem):
            events.append(self._part_event("response.content_part.added", ""))
        return events

    def _add_text(self, type_: str, text: str, *, logprobs: list[str] | None = None) -> Event:
        self._text.append(text)
        event = self._event(type_, delta=text)
        if not isinstance(self._open, FunctionCallItem):
            event.content_index = 0
        if logprobs is not None:
            event.logprobs = logprobs
        return event

    def _close_item(self, status: Status) -> list[Event]:
        """Closes the open item, if any."""
        if self._open is None:
            return []
        text = "".join(self._text)
        match self._open:
            case OutputMessage():
                done = self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
                closed = structs.replace(self._open, status=status, content=[OutputText(text=text)])
                events = [done, self._part_event("response.content_part.done", text)]
            case ReasoningItem():
                done = self._event("response.reasoning_text.done", content_index=0, text=text)
                closed = structs.replace(self._open, status=status, content=[ReasoningText(text=text)])
                events = [done, self._part_event("response.content_part.done", text)]
            case FunctionCallItem():
                events = [self._event("response.function_call_arguments.done", arguments=text)]
                closed = structs.replace(self._open, status=status, arguments=text)
        events.append(self._event("response.output_item.done", item=closed))
        self._items.append(closed)
        self._open = None
        self._text.clear()
        return events

    # ---- events --------------------------------------------------------------------------------

    def _stage(self, status: str) -> Event:
        return self._numbered(Event(type=f"response.{status}", sequence_number=0, response=self.response))

    def _part_event(self, type_: str, text: str) -> Event:
        is_message = isinstance(self._open, OutputMessage)
        part = OutputText(text=text) if is_message else ReasoningText(text=text)
        return self._event(type_, content_index=0, part=part)

    def _event(self, type_: str, **fields: Any) -> Event:  # Any: what the fields of Event take
        """Gives an event of the open item; one that carries the item itself does not name it as well."""
        assert self._open is not None, f"{type_}, and no item is open"
        if "item" not in fields:
            fields["item_id"] = self._open.id
        event = Event(type=type_, sequence_number=0, output_index=len(self._items), **fields)
        return self._numbered(event)

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event


def _message(id_: str) -> OutputMessage:
    return OutputMessage(id=id_, status="in_progress", content=[])


def _reasoning(id_: str) -> ReasoningItem:
    return ReasoningItem(id=id_, status="in_progress", content=[])


def _call(id_: str, call_id: str, name: str) -> FunctionCallItem:
    return FunctionCallItem(id=id_, status="in_progress", call_id=call_id, name=name, arguments="")
