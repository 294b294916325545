"""POST /v1/responses: a chat request under another name, answered as objects and events of items."""

from collections.abc import Iterable
from typing import Any

import msgspec
from anyio import to_thread
from quart import Response

from megallm.http.answers.replies import exchange_of_request, json_reply, now, read_request, stream_reply
from megallm.http.answers.responses_output import ResponseWriter, make_item_id
from megallm.http.bodies.prompts import LONG_TEXT
from megallm.http.bodies.responses_input import chat_request_of
from megallm.http.bodies.schema_responses import (
    Event,
    InputDetails,
    OutputDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from megallm.http.errors import RequestError
from megallm.http.parsers.pieces import Piece, Reasoning, first_call_only, join_pieces
from megallm.http.routes.chat import ChatRun, begin_chat
from megallm.http.service import Service


async def create_response(service: Service) -> Response:
    """Answers the request that is being handled.

    Raises: RequestError; EngineBusy, DrainingError, EngineStoppedError, EngineDeadError.
    """
    request = await read_request(service, ResponsesRequest)
    exchange = exchange_of_request()
    try:
        run = await begin_chat(service, exchange, chat_request_of(request))
    except RequestError as error:
        raise _renamed(error) from error
    output = _Output(service, request, run)
    if request.stream:
        return stream_reply(output, exchange)
    return json_reply(await output.whole())


class _Output:
    """The output of one request: whole, or as the frames of a stream."""

    def __init__(self, service: Service, request: ResponsesRequest, run: ChatRun) -> None:
        self._service = service
        self._generation = run.generation
        self._parser = run.parser()
        self._one_call = request.parallel_tool_calls is False
        self._writer = ResponseWriter(_response_of(service, request))
        self._reasoning: list[str] = []
        self._has_begun = False

    async def whole(self) -> ResponseObject:
        """Waits for the whole output.

        Raises: as `Generation.complete`.
        """
        (completion,) = await self._generation.complete()
        self._add([*self._parser.feed(completion.text), *self._parser.finish()])
        await self._end(completion.finish_reason)
        return self._writer.response

    async def next_frames(self) -> bytes | None:
        """Waits until a frame is to be sent; None after the last.

        Raises: as `Generation.next_deltas`.
        """
        if not self._has_begun:
            self._has_begun = True
            return _frames(self._writer.begin())
        events: list[Event] = []
        while not events and not self._generation.has_ended:
            for _, delta in await self._generation.next_deltas():
                events += self._add(self._parser.feed(delta.text))
                if delta.finish_reason is not None:
                    events += self._add(self._parser.finish())
                    events += await self._end(delta.finish_reason)
        return _frames(events) if events else None

    def _add(self, pieces: Iterable[Piece]) -> list[Event]:
        joined = join_pieces(first_call_only(pieces) if self._one_call else pieces)
        self._reasoning += [piece.text for piece in joined if isinstance(piece, Reasoning)]
        return self._writer.add(joined)

    async def _end(self, finish_reason: str) -> list[Event]:
        usage = self._generation.usage
        num_reasoning = min(await self._count_reasoning(), usage.completion_tokens)
        counts = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )
        return self._writer.end(finish_reason, counts, now())

    async def _count_reasoning(self) -> int:
        """Gives how many tokens the reasoning is; where they begin and end the text alone can tell."""
        text = "".join(self._reasoning)
        if not text:
            return 0

        def count() -> int:
            return len(self._service.encoder.encode(text, begins=False))

        return await to_thread.run_sync(count) if len(text) > LONG_TEXT else count()


def _response_of(service: Service, request: ResponsesRequest) -> ResponseObject:
    """Gives the response before any output: what the request asked for, as it is understood."""
    settings = service.settings
    given: dict[str, Any] = {  # Any: fields of ResponseObject
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": request.reasoning,
        "text": request.text if request.text is not None and request.text.format is not None else None,
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "user": request.user,
    }
    return ResponseObject(
        id=make_item_id("resp"),
        created_at=now(),
        model=settings.model_name,
        temperature=settings.default_temperature if request.temperature is None else request.temperature,
        top_p=settings.default_top_p if request.top_p is None else request.top_p,
        **{name: value for name, value in given.items() if value is not None},
    )


def _frames(events: Iterable[Event]) -> bytes:
    """Gives events as frames, each under its name, as this protocol has it; no `[DONE]` follows the last."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event)) for event in events
    )


RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Fields of a chat request, and what they are in a responses request."""


def _renamed(error: RequestError) -> RequestError:
    """Gives an error of the chat request as one of the request that was sent."""
    field = (error.param or "").partition("[")[0].partition(".")[0]
    if field not in RENAMED:
        return error
    message = str(error)
    for name, own in RENAMED.items():
        message = message.replace(name, own)
    return RequestError(
        message, param=RENAMED[field], code=error.code, status=error.http_status, headers=error.headers
    )
