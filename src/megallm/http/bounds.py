"""Refuses requests that ask for too much, before anything is tokenised, compiled or queued.

The limits are `service.Bounds`; each error names the value, the limit and the field.
"""

from collections.abc import Sized
from typing import Any

import msgspec

from megallm.http.bodies.schema import GenerationFields
from megallm.http.bodies.schema_chat import ChatRequest
from megallm.http.bodies.schema_completions import CompletionRequest
from megallm.http.errors import RequestError
from megallm.http.service import Bounds


def check_completion(request: CompletionRequest, bounds: Bounds, num_prompts: int) -> None:
    """Raises: RequestError for the first field that is over its limit, or not supported."""
    _at_most("prompt", num_prompts, bounds.max_prompts, "prompts")
    _check_common(request, bounds, num_prompts)
    _at_most("logprobs", request.logprobs or 0, bounds.max_logprobs)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(
            f"best_of is {request.best_of}; it is not supported, ask for n choices and pick one",
            param="best_of",
        )
    if request.suffix:
        raise RequestError("suffix is not supported; leave it out", param="suffix")


def check_chat(request: ChatRequest, bounds: Bounds) -> None:
    """Raises: RequestError for the first field that is over its limit, or not supported."""
    if not request.messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    _at_most("messages", len(request.messages), bounds.max_messages, "messages")
    _check_common(request, bounds, 1)
    _at_most("top_logprobs", request.top_logprobs or 0, bounds.max_top_logprobs)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs} and logprobs is not true; set it", param="top_logprobs"
        )
    _at_most_items("tools", request.tools, bounds.max_tools)
    for place, tool in enumerate(request.tools or ()):
        _check_size(f"tools[{place}].function.parameters", tool.function.parameters, bounds)


def _check_common(request: GenerationFields, bounds: Bounds, num_prompts: int) -> None:
    n = request.n or 1
    _at_most("n", n, bounds.max_n)
    _at_most("n", n * num_prompts, bounds.max_choices, "choices of all prompts together")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _at_most("stop", len(stops), bounds.max_stop_words, "strings")
    for place, stop in enumerate(stops):
        if not stop:
            raise RequestError("stop holds an empty string; leave it out", param="stop")
        _at_most(f"stop[{place}]", len(stop), bounds.max_stop_characters, "characters")
    _at_most_items("stop_token_ids", request.stop_token_ids, bounds.max_stop_token_ids)
    _at_most_items("logit_bias", request.logit_bias, bounds.max_logit_bias)
    _check_grammars(request, bounds)
    if request.multi_modal_data is not None:
        raise RequestError(
            "multi_modal_data is given and the model has no vision part; leave it out",
            param="multi_modal_data",
        )
    options = request.stream_options
    if options is not None and options.include_usage is not None and not request.stream:
        raise RequestError(
            "stream_options is given and stream is not true; set stream or leave it out",
            param="stream_options",
        )


def _check_grammars(request: GenerationFields, bounds: Bounds) -> None:
    """Checks the size of whatever the text is to match; its depth and meaning come later."""
    wanted = request.response_format
    if wanted is not None and wanted.json_schema is not None:
        _check_size("response_format.json_schema.schema", wanted.json_schema.schema, bounds)
    outputs = request.structured_outputs
    if outputs is not None:
        for name in outputs.__struct_fields__:
            _check_size(f"structured_outputs.{name}", getattr(outputs, name), bounds)
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        _check_size(name, getattr(request, name), bounds)


def _check_size(param: str, value: Any, bounds: Bounds) -> None:  # Any: what JSON holds
    if value is not None:
        try:
            size = len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
        except RecursionError:
            raise RequestError(f"{param} is nested too deep", param=param) from None
        _at_most(param, size, bounds.max_schema_bytes, "bytes")


def _at_most_items(param: str, items: Sized | None, limit: int) -> None:
    _at_most(param, len(items or ()), limit, "entries")


def _at_most(param: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        has = "has" if unit else "is"
        what = f"{value:,} {unit}".rstrip()
        raise RequestError(f"{param} {has} {what}; the limit is {limit:,}", param=param)
