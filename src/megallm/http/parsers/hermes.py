"""`hermes`: calls as JSON between `<tool_call>` and `</tool_call>`, as Qwen and SmolLM write them. Pure."""

from typing import Any

import msgspec

from megallm.http.parsers.markers import JsonEnd
from megallm.http.parsers.tool_calls import Call, Markers

START = "<tool_call>"
END = "</tool_call>"


class _JsonCall(msgspec.Struct):
    name: str
    # Any: the arguments are the tool's own matter; some models write the object as a string
    arguments: dict[str, Any] | str | None = None
    parameters: dict[str, Any] | None = None
    """What some models call the arguments."""


class HermesSyntax:
    """`{"name": ..., "arguments": {...}}` in each section, or a list of those."""

    sections = (Markers(START, END, JsonEnd),)

    def read(self, section: str) -> list[Call] | None:
        """Gives a section's calls; None where it is not their JSON."""
        text = section.removeprefix(START).removesuffix(END)
        try:
            decoded = msgspec.json.decode(text, type=_JsonCall | list[_JsonCall])
            calls = [decoded] if isinstance(decoded, _JsonCall) else decoded
            if not calls or not all(call.name for call in calls):
                return None
            return [Call(call.name, _object_of(call)) for call in calls]
        except (msgspec.DecodeError, RecursionError):
            return None


def _object_of(call: _JsonCall) -> str:
    """Gives a call's arguments as the JSON of one object. Raises: msgspec.DecodeError."""
    arguments = call.parameters if call.arguments is None else call.arguments
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments, type=dict[str, Any])
    return msgspec.json.encode(arguments or {}).decode()
