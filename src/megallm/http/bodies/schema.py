"""What completions and chat requests have in common, as Structs that msgspec fills from JSON.

A field that is null counts as absent. Limits that depend on settings are checked in `bounds.py`,
those that depend on the model in `sampling.py`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

type Count = Annotated[int, Meta(ge=0)]
type Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
type Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class StreamOptions(Struct, kw_only=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None


class JsonSchema(Struct, kw_only=True):
    """A schema as `response_format` carries it."""

    schema: dict[str, Any] | bool | None = None  # Any: what JSON holds
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, kw_only=True):
    """The same, with everything that a grammar can say; at most one of them."""

    json: dict[str, Any] | str | bool | None = None  # Any: what JSON holds
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationFields(Struct, kw_only=True):
    """The fields of a request that say how tokens are chosen, when they end and how they come."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 are off."""
    min_p: Share | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None  # Any: what JSON holds
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    streaming_interval: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a chunk waits for, except the last."""
    return_token_ids: bool | None = None
    multi_modal_data: Any = None  # Any: refused, whatever it is


def is_streamed(request: GenerationFields) -> bool:
    """Whether the response is a stream."""
    return bool(request.stream)


def includes_usage(request: GenerationFields) -> bool:
    """Whether a stream ends with a chunk of its token counts."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)
