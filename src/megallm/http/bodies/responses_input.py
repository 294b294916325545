"""A responses request as the chat request that it comes down to. Pure."""

from collections.abc import Callable
from typing import Literal

from megallm.http.bodies.schema import GenerationFields, JsonSchema, ResponseFormat
from megallm.http.bodies.schema_chat import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from megallm.http.bodies.schema_responses import (
    FunctionTool,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
)
from megallm.http.errors import RequestError

TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
"""Types of parts that are text; which one stands where makes no difference."""


def chat_request_of(request: ResponsesRequest) -> ChatRequest:
    """Gives the chat request whose answer is the response.

    Raises: RequestError naming the field that is not supported or not understood.
    """
    _refuse_unsupported(request)
    fields = {name: getattr(request, name) for name in GenerationFields.__struct_fields__}
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format_of(request.text.format)
    return ChatRequest(
        **fields,
        messages=_messages_of(request),
        max_completion_tokens=request.max_output_tokens,
        tools=[_tool_of(tool, place) for place, tool in enumerate(request.tools or ())] or None,
        tool_choice=_choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _refuse_unsupported(request: ResponsesRequest) -> None:
    """Raises: RequestError for what would need stored responses, other tools, or several answers."""
    stateless = "responses are not stored; send the whole conversation as input"
    refused = {
        "previous_response_id": (request.previous_response_id, stateless),
        "conversation": (request.conversation, stateless),
        "prompt": (request.prompt, "prompts are not stored; send the text as input"),
        "background": (request.background, "responses are not stored; use stream"),
        "top_logprobs": (request.top_logprobs, "use /v1/chat/completions"),
        "n": (request.n if request.n != 1 else None, "a response is one answer; send several requests"),
    }
    for param, (value, remedy) in refused.items():
        if value:
            raise RequestError(f"{param} is not supported: {remedy}", param=param)
    for place, included in enumerate(request.include or ()):
        if included != "reasoning.encrypted_content":  # clients send it unasked, and may be given none
            raise RequestError(
                f"include[{place}] is {included!r}, which is not supported; leave it out",
                param=f"include[{place}]",
            )


def _format_of(text: TextFormat) -> ResponseFormat:
    if text.type != "json_schema":
        return ResponseFormat(type=text.type)
    schema = JsonSchema(schema=text.schema, name=text.name, description=text.description, strict=text.strict)
    return ResponseFormat(type=text.type, json_schema=schema)


def _tool_of(tool: FunctionTool, place: int) -> Tool:
    if tool.type != "function":
        raise RequestError(
            f"tools[{place}].type is {tool.type!r}; the only tools are functions",
            param=f"tools[{place}].type",
        )
    if not tool.name:
        raise RequestError(f"tools[{place}].name is missing", param=f"tools[{place}].name")
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _choice_of(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "function" or not choice.name:
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or a function with its name', param="tool_choice"
        )
    return NamedTool(function=NamedFunction(name=choice.name))


def _messages_of(request: ResponsesRequest) -> list[Message]:
    """Gives the conversation; what the assistant said, called and thought in one turn is one message."""
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    for place, item in enumerate(request.input):
        path = f"input[{place}]"
        match item.type:
            case "message" if item.role == "assistant":
                _answer(messages, _has_no_text).content = _text_of(item.content, f"{path}.content")
            case "message":
                if item.role is None:
                    raise RequestError(f"{path}.role is missing", param=f"{path}.role")
                messages.append(Message(role=item.role, content=_text_of(item.content, f"{path}.content")))
            case "function_call":
                _add_call(messages, item, path)
            case "function_call_output":
                text = _text_of(item.output, f"{path}.output")
                messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))
            case "reasoning":
                parts = item.content or item.summary or []
                _answer(messages, _has_no_text).reasoning_content = _text_of(parts, f"{path}.content")
            case _:
                raise RequestError(
                    f"{path}.type is {item.type!r}, which is not supported", param=f"{path}.type"
                )
    return messages


def _answer(messages: list[Message], goes_on: Callable[[Message], bool]) -> Message:
    """Gives the assistant's message that an item belongs to: the last one, or a new one."""
    if not messages or messages[-1].role != "assistant" or not goes_on(messages[-1]):
        messages.append(Message(role="assistant"))
    return messages[-1]


def _has_no_text(message: Message) -> bool:
    """Whether what was said so far is reasoning alone: the text and the calls come after it."""
    return message.content is None and not message.tool_calls


def _add_call(messages: list[Message], item: InputItem, path: str) -> None:
    if not item.name:
        raise RequestError(f"{path}.name is missing", param=f"{path}.name")
    message = _answer(messages, lambda _: True)
    call = ToolCall(
        id=item.call_id, type="function", function=FunctionCall(name=item.name, arguments=item.arguments)
    )
    message.tool_calls = [*(message.tool_calls or ()), call]


def _text_of(content: str | list[InputPart] | None, path: str) -> str:
    """Gives the text of an item. Raises: RequestError naming a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for place, part in enumerate(content):
        if part.type not in TEXT_PARTS and part.type != "refusal":
            param = f"{path}[{place}].type"
            raise RequestError(f"{param} is {part.type!r}; only text is supported", param=param)
    return "".join(part.text or part.refusal or "" for part in content)
