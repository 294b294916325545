"""The body of a chat request."""

from typing import Any, Literal

from msgspec import Struct

from megallm.http.bodies.schema import Count, GenerationFields


class ContentPart(Struct, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    """Which function the assistant called, and with what."""

    name: str
    arguments: str | dict[str, Any] | None = None  # Any: what JSON holds


class ToolCall(Struct, kw_only=True):
    """A call that an assistant's message made."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    prompt_token_ids: list[int] | None = None
    """Of an assistant's message: the exact tokens it was made from, as the response gave them."""
    generation_token_ids: list[int] | None = None
    """The exact tokens it consists of."""


class FunctionDefinition(Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool that the model may use."""

    function: FunctionDefinition
    type: Literal["function"] | None = None


class NamedFunction(Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, kw_only=True):
    """The tool that the model has to use."""

    function: NamedFunction
    type: Literal["function"] | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to go on with."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    """Wins over `max_tokens`."""
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: what JSON holds
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message instead of beginning one."""
    prevent_retokenization: bool | None = None
    """False: an earlier answer's tokens are made from its text, not taken from the message."""
    skip_prompt_log_probs: bool | None = None
    """False, with `logprobs`: the message carries the log-probs of the prompt's tokens."""
