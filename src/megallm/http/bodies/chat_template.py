"""A conversation as a prompt: the tokenizer's own template, never a caller's.

Knows the kinds of tokenizers that users bring; the templates are rendered by them.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import msgspec

from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.bodies.schema_chat import ChatRequest, Message, ToolCall
from megallm.http.errors import RequestError

log = logging.getLogger(__name__)

type JsonObject = dict[str, Any]  # Any: what JSON holds

OPTIONS = frozenset(
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "custom_tools",
        "date_string",
        "documents",
        "enable_thinking",
        "force_nonempty_content",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools_in_user_message",
        "truncate_history_thinking",
        "xml_tools",
    }
)
"""What `chat_template_kwargs` may hold: variables of known templates, no option of a tokenizer."""


class ChatTemplate:
    """The template of one tokenizer. Without one the contents are joined with newlines, as upstream does."""

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        owner = _template_owner(tokenizer.wrapped)
        self._apply: Callable[..., str] | None = None if owner is None else owner.apply_chat_template
        template: object = None if owner is None else owner.chat_template
        self._knows_developers = "developer" in str(template)

    def messages_of(self, messages: list[Message]) -> list[JsonObject]:
        """Gives messages as templates take them: contents as text, arguments as objects.

        Raises: RequestError for a part that is no text.
        """
        return [self._plain(message, f"messages[{place}]") for place, message in enumerate(messages)]

    def render(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonObject] | None,
        options: Mapping[str, Any],
        begins_answer: bool,
    ) -> str:
        """Gives the text of a conversation. `begins_answer`: it ends where the assistant's answer begins.

        Raises: RequestError when the template refuses the messages.
        """
        if self._apply is None:
            return "\n".join(str(message["content"]) for message in messages)
        try:
            return self._apply(
                messages,
                tools=tools,
                tokenize=False,
                **{**options, "add_generation_prompt": begins_answer},
            )
        except (InvalidRequestError, jinja2.TemplateError) as error:
            raise RequestError(str(error), param="messages") from error
        except RecursionError:
            raise RequestError(
                "messages, tools or chat_template_kwargs are nested too deep", param="messages"
            ) from None
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            log.warning("the chat template failed", exc_info=error)
            raise RequestError(
                "the chat template can't render the messages; the server's log says why", param="messages"
            ) from error

    def _plain(self, message: Message, where: str) -> JsonObject:
        role = "system" if message.role == "developer" and not self._knows_developers else message.role
        plain: JsonObject = {"role": role, "content": _text_of(message, where)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                plain[name] = value
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        return plain


def template_options(request: ChatRequest) -> JsonObject:
    """Gives the variables of the template that a request sets.

    Raises: RequestError for one that is not on the list.
    """
    given = request.chat_template_kwargs or {}
    for name in given:
        if name not in OPTIONS:
            raise RequestError(
                f"chat_template_kwargs.{name:.100} is not allowed; allowed are {', '.join(sorted(OPTIONS))}",
                param=f"chat_template_kwargs.{name:.100}",
            )
    return given


def _text_of(message: Message, where: str) -> str:
    """Gives a content as text: parts are joined with newlines, none is empty."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts: list[str] = []
    for place, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"{where}.content[{place}] has type {part.type!r:.100}; the model takes text alone",
                param=f"{where}.content[{place}].type",
            )
        if text is None:
            raise RequestError(
                f"{where}.content[{place}] has no text", param=f"{where}.content[{place}].text"
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: ToolCall) -> JsonObject:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # templates take the text as it is
            arguments = msgspec.json.decode(arguments, type=dict[str, Any]) if arguments else {}
    plain: JsonObject = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": {} if arguments is None else arguments},
    }
    return plain if call.id is None else {"id": call.id, **plain}


def _template_owner(wrapped: Any) -> Any | None:  # Any: a user's tokenizer
    """Finds what renders the template: the tokenizer, or the Hugging Face one in megatron's."""
    inner = getattr(wrapped, "_tokenizer", None)
    for candidate in (getattr(inner, "tokenizer", None), inner, wrapped):
        has_method = callable(getattr(candidate, "apply_chat_template", None))
        if has_method and getattr(candidate, "chat_template", None):
            return candidate
    return None
