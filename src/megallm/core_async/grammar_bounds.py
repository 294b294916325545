"""How large and how involved a grammar may be.

A grammar may come from a stranger. Within these bounds, and the limits that `matchers.py` sets, llguidance
ends by itself in about a second; beyond them some inputs take minutes or gigabytes. Knows JSON schemas and
Lark grammars as text, and nothing of what they mean.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Final, cast

from msgspec import Struct

type Json = dict[str, Json] | list[Json] | str | int | float | bool | None

MAX_BYTES: Final = 65_536
"""Of a schema, an expression, a grammar, or all choices: what larger ones take grows with the square."""
MAX_DEPTH: Final = 100
"""Objects and lists inside each other in a schema; llguidance's reader gives up at 128."""
MAX_PATTERNS: Final = 8
"""Patterns and formats that one string must meet together: 16 take a second, 18 eleven and half a GB."""
MAX_MULTIPLE: Final = 10_000
"""`multipleOf` without its decimal point, or the product of those that must hold together: so many states has
the number's automaton, and 100,000 take two seconds."""
MAX_PROPERTIES: Final = 1000
"""Of one object. Compiling 3,000 takes two seconds; of more than 250, most have to be required."""
MAX_RULES: Final = 500
"""Of a grammar. Terminals that repeat each other are the slowest: 500 take 0.3 s, 1,000 take 1.2 s."""

_MANY: Final = 10**18
"""No product is counted further."""

_LARK: Final = re.compile(
    r""""(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?:\#|//)[^\n]*"""
    r"""|(?P<inline>%(?:json|regex|llguidance)\s*)|(?P<colon>:)|(?P<without>&|~(?!\s*\d))|[^"/<\#%:&~]+|."""
)
"""The parts of a Lark grammar, as llguidance takes it apart: strings, expressions, tokens, comments, rest."""


def read_json(text: str, place: int = 0) -> tuple[Json, int]:
    """Gives the JSON value that starts at a place of a text, and the place behind it.

    Raises: ValueError where there is none (NaN and what exceeds a float are none either), RecursionError.
    """
    return cast("tuple[Json, int]", _DECODER.raw_decode(text, place))  # cast: it gives Any


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is no number in JSON")
    return number


_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def check_size(field: str, text: str) -> None:
    """Raises: ValueError where a text is too large, or can't be encoded."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds half a surrogate pair, at character {error.start:,}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{field} has {size:,} bytes, the limit is {MAX_BYTES:,}; make it smaller")


def check_schema(field: str, schema: Json) -> None:
    """Checks that llguidance is done with a schema in a short time.

    Raises: ValueError naming `field`, the number and its limit.
    """
    weights = _Weights(schema)
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise too_deep(field)
        if isinstance(node, dict):
            _check_object(field, node, weights)


def _check_object(field: str, node: dict[str, Json], weights: "_Weights") -> None:
    properties = node.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise ValueError(
            f"{field} has an object of {len(properties):,} properties, the limit is {MAX_PROPERTIES:,};"
            " divide it into several"
        )
    try:
        weight = weights.of(node)
    except RecursionError as error:
        raise ValueError(f"{field} has too long a chain of $ref; make it shorter") from error
    if weight.patterns > MAX_PATTERNS:
        raise ValueError(
            f"{field} asks for {weight.patterns} patterns and formats at once, the limit is {MAX_PATTERNS};"
            " take some out of its allOf"
        )
    if weight.multiple > MAX_MULTIPLE:
        raise ValueError(
            f"{field} has a multipleOf of {weight.multiple:,} steps (the digits, times those that must hold"
            f" with it), the limit is {MAX_MULTIPLE:,}; take it out and check the number yourself"
        )


def too_deep(field: str) -> ValueError:
    """Gives the error for what is nested too deep."""
    return ValueError(f"{field} is nested more than {MAX_DEPTH} deep, which is the limit; make it flatter")


def _nodes(root: Json) -> Iterator[tuple[Json, int]]:
    """Gives every object and list with its depth, not below the first that is too deep."""
    waiting = [(root, 1)]
    while waiting:
        node, depth = waiting.pop()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        yield node, depth
        if depth <= MAX_DEPTH:
            waiting += [(child, depth + 1) for child in inner if isinstance(child, dict | list)]


class _Weight(Struct, frozen=True, gc=False):
    """How much must hold at once of one value."""

    patterns: int = 0
    multiple: int = 1


class _Weights:
    """Adds up what a schema asks of one value, through allOf, anyOf, oneOf and $ref."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._known: dict[int, _Weight] = {}

    def of(self, node: Json) -> _Weight:
        """Gives an upper bound; a schema that contains itself counts once."""
        if not isinstance(node, dict):
            return _Weight()
        known = self._known.get(id(node))
        if known is not None:
            return known
        self._known[id(node)] = _Weight()
        patterns = sum(isinstance(node.get(key), str) for key in ("pattern", "format"))
        multiple = _steps(node.get("multipleOf"))
        for weight in self._together(node):
            patterns += weight.patterns
            multiple *= weight.multiple
        weight = _Weight(patterns, min(multiple, _MANY))
        self._known[id(node)] = weight
        return weight

    def _together(self, node: dict[str, Json]) -> Iterator[_Weight]:
        for member in _members(node, "allOf"):
            yield self.of(member)
        for key in ("anyOf", "oneOf"):
            weights = [self.of(member) for member in _members(node, key)]
            if weights:
                yield _Weight(max(w.patterns for w in weights), max(w.multiple for w in weights))
        reference = node.get("$ref")
        if isinstance(reference, str):
            yield self.of(_target(self._root, reference))


def _members(node: dict[str, Json], key: str) -> list[Json]:
    members = node.get(key)
    return members if isinstance(members, list) else []


def _steps(multiple: Json) -> int:
    """Gives a multipleOf without its decimal point; 1 for a power of ten, which is only digits."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 1
    _, digits, exponent = abs(Decimal(repr(multiple))).as_tuple()
    assert isinstance(exponent, int), f"JSON holds no {multiple}"
    steps = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    return 1 if str(steps).strip("0") in ("", "1") else steps


def _target(root: Json, reference: str) -> Json:
    """Gives what a `#/...` reference names; None where that is nothing, which llguidance will report."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def check_rules(text: str) -> None:
    """Checks that llguidance is done with a Lark grammar in a short time.

    Raises: ValueError naming the part and its limit.
    """
    rules = place = 0
    while place < len(text):
        part = _LARK.match(text, place)
        assert part is not None, f"any character is a part, and {text[place]!r} is none"
        place = part.end()
        rules += part["colon"] is not None
        if part["without"]:
            raise ValueError(
                f"grammar has {part['without']} in line {_line(text, place)}: terminals that must match"
                " together or must not match can take minutes to compile; write them another way"
            )
        if part["inline"]:
            try:
                value, place = read_json(text, place)
            except ValueError as error:
                keyword = part["inline"].rstrip()
                raise ValueError(
                    f"grammar has no JSON behind {keyword} in line {_line(text, place)}: {error}"
                ) from error
            except RecursionError as error:
                raise too_deep("grammar") from error
            check_schema("grammar", value)
    check_num_rules(rules)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def check_num_rules(rules: int) -> None:
    """Raises: ValueError where a grammar has more rules than it may."""
    if rules > MAX_RULES:
        raise ValueError(f"grammar has {rules:,} rules, the limit is {MAX_RULES}; make it smaller")
