"""Checks JSON values against the part of JSON Schema that tests use."""

import re
from collections.abc import Callable, Sized
from typing import Any

type Check = Callable[[Any, dict[str, Any], str], list[str]]

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def faults(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:  # Any: what JSON holds
    """Gives what of a value a schema forbids, each with its place."""
    found: list[str] = []
    if "anyOf" in schema and all(faults(value, member) for member in schema["anyOf"]):
        found.append(f"{where}: {value!r} is none of the members")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    kind = schema.get("type")
    if kind is None:
        return found
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return [*found, f"{where}: {value!r} is no {kind}"]
    return found + CHECKS[kind](value, schema, where)


def _object(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    properties: dict[str, Any] = schema.get("properties", {})
    found = [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
    if schema.get("additionalProperties") is False:
        found += [f"{where}: {name} is one too many" for name in value if name not in properties]
    for name in properties.keys() & value.keys():
        found += faults(value[name], properties[name], f"{where}.{name}")
    return found


def _array(value: list[Any], schema: dict[str, Any], where: str) -> list[str]:
    found = _length(value, schema.get("minItems", 0), schema.get("maxItems"), where)
    for place, item in enumerate(value):
        found += faults(item, schema.get("items", {}), f"{where}[{place}]")
    return found


def _string(value: str, schema: dict[str, Any], where: str) -> list[str]:
    found = _length(value, schema.get("minLength", 0), schema.get("maxLength"), where)
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not match")
    return found


def _length(value: Sized, least: int, most: int | None, where: str) -> list[str]:
    fits = least <= len(value) <= (len(value) if most is None else most)
    return [] if fits else [f"{where}: it has a length of {len(value)}"]


def _number(value: float, schema: dict[str, Any], where: str) -> list[str]:
    fits = schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return [] if fits else [f"{where}: {value} is out of range"]


def _nothing(value: object, schema: dict[str, Any], where: str) -> list[str]:
    return []


CHECKS: dict[str, Check] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": _nothing,
    "null": _nothing,
}
