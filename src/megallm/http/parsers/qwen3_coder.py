"""`qwen3-coder-tool`: calls as `<function=NAME>` with a `<parameter=NAME>` for each argument. Pure.

Values are plain text; what JSON they are depends on the types that the tool's definition declares.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megallm.http.parsers.tool_calls import Call, Markers

START = "<tool_call>"
END = "</tool_call>"
FUNCTION_START = "<function="
FUNCTION_END = "</function>"

MAX_LITERAL_LENGTH = 10_000
"""Characters of a value that is tried as a Python literal: the parser of those recurses."""

MAX_EXACT = 2**53
"""Whole floats below it are written as integers without losing any digit."""

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)\s*>(.*?)(?:</parameter>\s*|(?=<parameter=)|\Z)", re.DOTALL)


class Qwen3CoderSyntax:
    """Functions in `<tool_call>` and `</tool_call>`, or bare."""

    sections = (Markers(START, END), Markers(FUNCTION_START, FUNCTION_END))

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: definitions as the chat API takes them; a tool that is none of them has strings only."""
        self._types = dict(map(_types_of, tools))

    def read(self, section: str) -> list[Call] | None:
        """Gives a section's calls; None where anything but blanks is outside of functions and parameters."""
        text = section.removeprefix(START).removesuffix(END).rstrip()
        calls: list[Call] = []
        at = 0
        while at < len(text):
            function = _FUNCTION.match(text, at)
            if function is None:
                return None
            arguments = self._read_parameters(function[1], function[2])
            if arguments is None:
                return None
            calls.append(Call(function[1], msgspec.json.encode(arguments).decode()))
            at = function.end()
        return calls or None

    # Any: a value is whatever JSON the tool declares
    def _read_parameters(self, name: str, text: str) -> dict[str, Any] | None:
        types = self._types.get(name, {})
        arguments: dict[str, Any] = {}
        at, end = 0, len(text.rstrip())
        while at < end:
            parameter = _PARAMETER.match(text, at)
            if parameter is None:
                return None
            # the template puts each value on lines of its own
            value = parameter[2].removeprefix("\n").removesuffix("\n")
            arguments[parameter[1]] = _value_of(value, types.get(parameter[1], ()))
            at = parameter.end()
        return arguments


class _Schema(msgspec.Struct):
    type: str | list[str] = []
    any_of: list["_Schema"] = msgspec.field(name="anyOf", default_factory=list["_Schema"])


class _Parameters(msgspec.Struct):
    properties: dict[str, Any] = {}  # Any: each is looked at by itself


class _Function(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Tool(msgspec.Struct):
    function: _Function


# Any: a definition is a caller's JSON
def _types_of(tool: Mapping[str, Any]) -> tuple[str, dict[str, list[str]]]:
    """Gives a tool's name, and the JSON types of each parameter; nothing for what is no such definition."""
    try:
        function = msgspec.convert(tool, _Tool).function
    except msgspec.ValidationError:
        return "", {}
    parameters = function.parameters or _Parameters()
    return function.name, {name: _json_types(schema) for name, schema in parameters.properties.items()}


def _json_types(schema: Any) -> list[str]:  # Any: the same
    try:
        read = msgspec.convert(schema, _Schema)
    except msgspec.ValidationError:
        return []
    named = [read.type] if isinstance(read.type, str) else read.type
    return named + [each for option in read.any_of for each in _json_types(msgspec.to_builtins(option))]


def _value_of(text: str, types: Sequence[str]) -> Any:  # Any: whatever JSON it is
    """Gives a value as the first of the declared types that it can be read as, else the text itself."""
    if text.lower() == "null":
        return None
    for declared in types:
        match declared:
            case "integer" | "number":
                value = _number_of(text, is_whole=declared == "integer")
            case "boolean":
                value = {"true": True, "false": False}.get(text.lower())
            case "object" | "array":
                value = _container_of(text, dict if declared == "object" else list)
            case _:
                value = None
        if value is not None:
            return value
    return text


def _number_of(text: str, *, is_whole: bool) -> float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or (is_whole and not number.is_integer()):
        return None
    return int(number) if number.is_integer() and abs(number) < MAX_EXACT else number


def _container_of(text: str, kind: type[Any]) -> Any:  # Any: the same
    """Reads JSON, or what models write in its place: a Python literal."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        pass
    if len(text) > MAX_LITERAL_LENGTH:
        return None
    try:
        value = ast.literal_eval(text)
        same = msgspec.json.decode(msgspec.json.encode(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    # a set, bytes, NaN: what JSON has no value for
    return value if isinstance(value, kind) and same == value else None
