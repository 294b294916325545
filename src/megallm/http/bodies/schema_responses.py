"""The body of a responses request, and the objects and events of its answer, as they are in JSON.

Each field of an answer is what the protocol's clients expect there, also where it says nothing here.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from megallm.http.bodies.schema import Count, GenerationFields

# ---- the request ------------------------------------------------------------------------------


class InputPart(Struct, kw_only=True):
    """A part of an input item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """One item of a conversation: a message, a call, a call's result, or reasoning."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    """The tool that the model has to use."""

    type: str
    name: str | None = None


class TextFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None  # Any: a JSON schema
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    """How the text is to be written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """How much to reason; a model without such a setting ignores it."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """A conversation to answer."""

    input: str | list[InputItem]
    instructions: str | None = None
    """What the conversation begins with, as the system's message."""
    max_output_tokens: Count | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: what JSON holds
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    """Ignored: nothing is stored."""
    truncation: str | None = None
    include: list[str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_logprobs: Count | None = None
    max_tool_calls: Count | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None  # Any: refused, whatever it is
    prompt: Any = None  # Any: the same


# ---- the answer -------------------------------------------------------------------------------

type Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, tag="output_text", kw_only=True):
    """The text of a message."""

    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class ReasoningText(Struct, tag="reasoning_text", kw_only=True):
    """The text of an item of reasoning."""

    text: str


class OutputMessage(Struct, tag="message", kw_only=True):
    """What the model says."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """What the model thinks."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[str] = []


class FunctionCallItem(Struct, tag="function_call", kw_only=True):
    """A call of a function."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


type OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(Struct, kw_only=True):
    """What of the input was read from the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """What of the output was reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    """Why a response ended early."""

    reason: str


class ResponseError(Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response, at whatever stage."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: Reasoning = Reasoning()
    store: bool = False
    temperature: float
    text: TextConfig = TextConfig(format=TextFormat(type="text"))
    tool_choice: str | ToolChoice = "auto"
    tools: list[FunctionTool] = []
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    background: bool = False


class Event(Struct, kw_only=True):
    """One event of a stream; each type has some of the fields."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[str] | UnsetType = UNSET
