"""Checks JSON values against the part of JSON Schema that tests use."""

import re
from typing import Any

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
    if kind is not None and (
        not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [*found, f"{where}: {value!r} is no {kind}"]
    match value:
        case dict():
            found += _object_faults(value, schema, where)
        case list():
            if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
                found.append(f"{where}: {len(value)} items")
            for place, item in enumerate(value):
                found += faults(item, schema.get("items", {}), f"{where}[{place}]")
        case str():
            if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
                found.append(f"{where}: {len(value)} characters")
            if "pattern" in schema and not re.search(schema["pattern"], value):
                found.append(f"{where}: {value!r} does not match")
        case int() | float():
            if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
                found.append(f"{where}: {value} is out of range")
        case _:
            pass
    return found


def _object_faults(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    properties: dict[str, Any] = schema.get("properties", {})
    found = [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
    if schema.get("additionalProperties") is False:
        found += [f"{where}: {name} is one too many" for name in value if name not in properties]
    for name, inner in properties.items():
        if name in value:
            found += faults(value[name], inner, f"{where}.{name}")
    return found
