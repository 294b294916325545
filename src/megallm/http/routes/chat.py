"""POST /v1/chat/completions: conversations to go on with, whole or streamed."""

from msgspec import Struct
from quart import Response

from megallm.http.answers.chat_writer import ChatWriter
from megallm.http.answers.choice_stream import ChoiceStream
from megallm.http.answers.generation import Asked, Generation, prepare
from megallm.http.answers.replies import (
    check_model,
    exchange_of_request,
    json_reply,
    note_model,
    read_request,
    stream_reply,
)
from megallm.http.bodies.chat_prompt import chat_prompt
from megallm.http.bodies.chat_template import JsonObject, template_options
from megallm.http.bodies.sampling import request_params
from megallm.http.bodies.schema import includes_usage
from megallm.http.bodies.schema_chat import ChatRequest
from megallm.http.bodies.tool_choice import ToolChoice
from megallm.http.bounds import check_chat
from megallm.http.parsers.pieces import OutputParser
from megallm.http.service import Service
from megallm.http.traffic import Exchange


class ChatRun(Struct):
    """A chat request that the engine is answering."""

    generation: Generation
    tools: ToolChoice
    options: JsonObject
    """The variables of its template."""
    parsers: tuple[str, ...]

    def parser(self) -> OutputParser:
        """Gives a new parser for the output of one choice."""
        return self.tools.parser(self.parsers, self.options)


async def create_chat_completion(service: Service) -> Response:
    """Answers the request that is being handled.

    Raises: RequestError; EngineBusy, DrainingError, EngineStoppedError, EngineDeadError.
    """
    request = await read_request(service, ChatRequest)
    exchange = exchange_of_request()
    run = await begin_chat(service, exchange, request)
    parsers = [run.parser() for _ in run.generation.choices]
    writer = ChatWriter(service, request, run.generation, parsers, is_named=run.tools.is_named)
    if request.stream:
        stream = ChoiceStream(run.generation, writer, with_usage=includes_usage(request))
        return stream_reply(stream, exchange)
    return json_reply(writer.whole(await run.generation.complete()))


async def begin_chat(service: Service, exchange: Exchange, request: ChatRequest) -> ChatRun:
    """Checks a request, makes its prompt, and queues its choices.

    Raises: as `create_chat_completion`.
    """
    note_model(service, exchange, request.model)
    check_model(service, request.model)
    check_chat(request, service.settings.bounds)
    service.check_open()
    tools, options, asked = ToolChoice(request), template_options(request), _asked(request)
    params = request_params(
        request,
        service.settings,
        max_tokens=None if asked is None else asked.num_tokens,
        num_top=(request.top_logprobs or 0) if request.logprobs else None,
        scores_prompt=bool(request.logprobs) and request.skip_prompt_log_probs is False,
    )
    tools.hold(params)
    generation = await prepare(
        service,
        exchange,
        [await chat_prompt(service, request, tools.definitions)],
        params,
        n=request.n or 1,
        is_streamed=bool(request.stream),
        asked=asked,
        interval=request.streaming_interval or 1,
        spells_specials=request.skip_special_tokens is False,
        subject="messages",
    )
    await generation.start()
    return ChatRun(generation, tools, options, service.settings.parsers)


def _asked(request: ChatRequest) -> Asked | None:
    """Gives the budget that a request names; None: all the context holds."""
    for param in ("max_completion_tokens", "max_tokens"):
        if (num_tokens := getattr(request, param)) is not None:
            return Asked(param, num_tokens)
    return None
