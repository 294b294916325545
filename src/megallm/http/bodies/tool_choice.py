"""Which tools the model may call, which it has to, and what its output is held to for that.

Pure: knows requests and the pieces of an output, no engine.
"""

import json
import secrets
from typing import Any

import msgspec

from megallm.http.bodies.sampling import RequestParams
from megallm.http.bodies.schema_chat import ChatRequest, FunctionDefinition, NamedTool
from megallm.http.errors import RequestError
from megallm.http.parsers.pieces import Content, OutputParser, Piece, ToolCallArguments, ToolCallStart
from megallm.http.parsers.registry import make_parser

type JsonObject = dict[str, Any]  # Any: what JSON holds

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


class ToolChoice:
    """The tools of one request."""

    def __init__(self, request: ChatRequest) -> None:
        """Raises: RequestError when a tool has to be called that is not there."""
        given = request.tools or []
        choice = request.tool_choice
        if choice is not None and choice not in ("none", "auto") and not given:
            raise RequestError(
                "tool_choice asks for a call and tools is empty; give tools", param="tool_choice"
            )
        self.functions = [tool.function for tool in given] if choice != "none" else []
        self.forced: list[FunctionDefinition] = []
        """Those of which one has to be called; empty: the model decides."""
        self.is_named = isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            self.forced = [each for each in self.functions if each.name == choice.function.name]
            if not self.forced:
                known = ", ".join(each.name for each in self.functions)
                raise RequestError(
                    f"tool_choice names {choice.function.name!r:.200}, which is not among tools: {known}",
                    param="tool_choice.function.name",
                )
        elif choice == "required":
            self.forced = self.functions

    @property
    def definitions(self) -> list[JsonObject] | None:
        """The tools as chat templates and parsers take them; None where there are none."""
        return [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description or "",
                    "parameters": NO_PARAMETERS if each.parameters is None else each.parameters,
                },
            }
            for each in self.functions
        ] or None

    def hold(self, params: RequestParams) -> None:
        """Holds the output to JSON of the call that has to be made.

        Raises: RequestError when it is held to something else already.
        """
        if not self.forced:
            return
        if params.has_grammar:
            raise RequestError(
                "tool_choice asks for a call, and the text is held to another format; give one of the two",
                param="tool_choice",
            )
        params.json_schema = _schema_of(self.forced[0]) if self.is_named else _schema_of_calls(self.forced)

    def parser(self, names: tuple[str, ...], template_options: JsonObject) -> OutputParser:
        """Gives a new parser for one output."""
        if self.is_named:
            return _NamedCall(self.forced[0].name)
        if self.forced:
            return _RequiredCalls()
        return make_parser(names, self.definitions, template_options)


def new_call_id() -> str:
    """Gives an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def _schema_of(function: FunctionDefinition) -> JsonObject:
    return NO_PARAMETERS if function.parameters is None else function.parameters


def _schema_of_calls(functions: list[FunctionDefinition]) -> JsonObject:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each.name}, "arguments": _without_definitions(_schema_of(each))},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    for each in functions:
        for key in ("$defs", "definitions"):
            if key in _schema_of(each):
                schema[key] = {**schema.get(key, {}), **_schema_of(each)[key]}
    return schema


def _without_definitions(schema: JsonObject) -> JsonObject:
    """Gives a schema that is to be a part of another: what it refers to by name stands at the root."""
    return {
        key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema", "$id")
    }


class _NamedCall:
    """An output that is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._start: list[Piece] = [ToolCallStart(0, new_call_id(), name)]

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        start, self._start = self._start, []
        return [*start, ToolCallArguments(0, text)]

    def finish(self) -> list[Piece]:
        return []


class _RequiredCalls:
    """An output that is a JSON array of calls, given when it is whole."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        try:
            calls = msgspec.json.decode(self._text, type=list[_Call])
        except msgspec.DecodeError:  # cut off by its length
            return [Content(self._text)] if self._text else []
        pieces: list[Piece] = []
        for index, call in enumerate(calls):
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            pieces += [ToolCallStart(index, new_call_id(), call.name), ToolCallArguments(index, arguments)]
        return pieces


class _Call(msgspec.Struct):
    name: str
    arguments: JsonObject
