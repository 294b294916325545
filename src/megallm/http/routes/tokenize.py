"""POST /tokenize and /detokenize: what the tokenizer makes of texts, conversations and ids."""

from typing import Any

from anyio import to_thread
from msgspec import Struct
from quart import Response

from megallm.http.answers.replies import check_model, json_reply, read_request
from megallm.http.bodies.chat_prompt import chat_prompt
from megallm.http.bodies.prompts import LONG_TEXT
from megallm.http.bodies.schema_chat import ChatRequest, Message, Tool
from megallm.http.bodies.tool_choice import ToolChoice
from megallm.http.errors import RequestError
from megallm.http.service import Service


class TokenizeRequest(Struct, kw_only=True):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: what JSON holds
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Of a text; False: put no bos before it."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service) -> Response:
    """Gives the ids of a text or of a conversation, as a completion or a chat would see them.

    Raises: RequestError.
    """
    request = await read_request(service, TokenizeRequest)
    check_model(service, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give one of prompt and messages", param="prompt")
    if request.messages is None:
        ids = await _ids_of_text(service, request.prompt or "", request.add_special_tokens is not False)
    else:
        chat = ChatRequest(
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        if not chat.messages:
            raise RequestError("messages is empty; give at least one message", param="messages")
        ids = await chat_prompt(service, chat, ToolChoice(chat).definitions)
    reply: dict[str, object] = {
        "count": len(ids),
        "max_model_len": service.port.config.max_sequence_length,
        "tokens": ids,
    }
    if request.return_token_strs:
        reply["token_strs"] = [service.vocabulary.spelling(each) for each in ids]
    return json_reply(reply)


async def detokenize(service: Service) -> Response:
    """Gives the text of ids, special tokens included.

    Raises: RequestError for an id that the vocabulary has not.
    """
    request = await read_request(service, DetokenizeRequest)
    check_model(service, request.model)
    vocab_size = service.port.config.vocab_size
    for place, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"tokens[{place}] is {token_id}; the vocabulary is 0 to {vocab_size - 1:,}",
                param=f"tokens[{place}]",
            )
    encoded = b"".join(service.vocabulary.bytes_of(each) for each in request.tokens)
    return json_reply({"prompt": encoded.decode(errors="replace")})


async def _ids_of_text(service: Service, text: str, begins: bool) -> list[int]:  # noqa: FBT001 - called above
    def encode() -> list[int]:
        return service.encoder.encode(text, begins=begins)

    return await to_thread.run_sync(encode) if len(text) > LONG_TEXT else encode()
