"""From the structured-output fields of SamplingParams to one grammar, as llguidance's JSON.

Knows what the fields may hold and how large it may be; what a grammar means is llguidance's business. The
bounds are there because a grammar may come from a stranger: inside them llguidance ends by itself in about
a second (`matchers.py` adds its own limits), beyond them some inputs take minutes or gigabytes.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from importlib.util import find_spec
from typing import Final, cast

from msgspec import Struct

type Json = dict[str, Json] | list[Json] | str | int | float | bool | None

FIELDS: Final = ("json_schema", "regex", "choice", "grammar")

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
"""Of a grammar. One step through 3,000 rules that may all be empty takes 2 s, 500 take half a second."""
MAX_MESSAGE: Final = 200
"""Characters of llguidance's message that an error repeats; it quotes whole expressions."""

WHITESPACE: Final = r"[\x20\t\r\n]{1,32}"
"""Between the tokens of JSON: without a bound, a small model may write nothing else until its budget ends."""

_RULE: Final = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^\n]*:", re.MULTILINE)


def require_llguidance() -> None:
    """Checks that llguidance can be imported.

    Raises: ImportError naming the extra that brings it.
    """
    if find_spec("llguidance") is None:
        raise ImportError(
            "json_schema, regex, choice and grammar need llguidance, which is not installed;"
            " pip install 'megallm[structured]'"
        )


def grammar_of(params: object) -> str:
    """Gives what the output has to match; "" where no field of `params` asks for anything.

    Says nothing yet of whether llguidance can compile it: `Matchers.check` does.

    Raises: TypeError and ValueError naming the field and its fault, ImportError without llguidance.
    """
    given = {field: value for field in FIELDS if (value := getattr(params, field, None)) is not None}
    if not given:
        return ""
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; an output can be held to one of them")
    require_llguidance()
    field, value = given.popitem()
    match field:
        case "json_schema":
            body: dict[str, Json] = {"json_schema": _schema(value)}
        case "regex":
            body = {"lark_grammar": f"start: /{_slashed(_text('regex', value))}/"}
        case "choice":
            body = {"lark_grammar": f"start: /(?:{'|'.join(map(_escaped, _choices(value)))})/"}
        case _:
            body = {"lark_grammar": _lark(_text("grammar", value))}
    return json.dumps({"grammars": [{"name": field, **body}]}, ensure_ascii=False)


def field_of(grammar: str) -> str:
    """Gives the name of the field that a grammar of `grammar_of` was made from."""
    return str(json.loads(grammar)["grammars"][0]["name"])


def shortened(message: str) -> str:
    """Gives the part of one of llguidance's messages that tells what is wrong."""
    lines = [line.strip() for line in message.splitlines()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    said = re.sub(r"^(error: |at \d+\(\d+\): )", "", said)
    return said if len(said) <= MAX_MESSAGE else said[:MAX_MESSAGE] + "..."


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is a {type(value).__name__}; give a string")
    _check_size(field, value)
    if field == "grammar" and not value.strip():
        raise ValueError("grammar is empty; give rules, the first of them named start")
    return value


def _check_size(field: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds half a surrogate pair, at character {error.start:,}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{field} has {size:,} bytes, the limit is {MAX_BYTES:,}; make it smaller")


def _choices(value: object) -> list[str]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"choice is a {type(value).__name__}; give a list of strings")
    choices = cast("list[object] | tuple[object, ...]", value)  # cast: isinstance says no more
    if not choices:
        raise ValueError("choice is an empty list; give at least one string")
    for choice in choices:
        if not isinstance(choice, str):
            raise TypeError(f"choice holds a {type(choice).__name__}, {choice!r}; give strings")
    texts = list(dict.fromkeys(cast("list[str]", choices)))  # cast: each was looked at
    _check_size("choice", "|".join(texts))
    return texts


def _escaped(text: str) -> str:
    """Gives the regular expression that matches a text and nothing else."""
    return "".join(
        character if character.isalnum() or character in " _" else f"\\x{{{ord(character):X}}}"
        for character in text
    )


def _slashed(expression: str) -> str:
    """Gives an expression as it stands between slashes."""
    from llguidance import regex_to_lark  # noqa: PLC0415 - an extra

    return regex_to_lark(expression, use_ascii="")


def _lark(text: str) -> str:
    """Gives a grammar in llguidance's Lark, where it is one of llama.cpp's GBNF too."""
    rules = len(_RULE.findall(text))
    if rules > MAX_RULES:
        raise ValueError(f"grammar has {rules:,} rules, the limit is {MAX_RULES}; make it smaller")
    for inline in re.finditer(r"%json\s*", text):
        try:
            schema = cast("Json", json.JSONDecoder().raw_decode(text, inline.end())[0])  # cast: it gives Any
        except ValueError:
            continue  # no schema, so the text of a string or a comment, or a fault that llguidance names
        except RecursionError as error:
            raise _too_deep("grammar") from error
        _check_schema("grammar", schema)
    from llguidance import grammar_from  # noqa: PLC0415 - an extra

    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise ValueError(f"grammar: {shortened(str(error))}") from error


def _schema(value: object) -> Json:
    """Gives a JSON schema as plain JSON, within the bounds and with bounded whitespace."""
    describe = getattr(value, "model_json_schema", None)
    given: object = describe() if callable(describe) else value
    if not isinstance(given, dict | str | bool):
        raise TypeError(
            f"json_schema is a {type(value).__name__}; give a dict, its JSON text, True for any JSON,"
            " or a pydantic model"
        )
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
        _check_size("json_schema", text)
        schema = cast("Json", json.loads(text))  # cast: it gives Any
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    except TypeError as error:
        raise TypeError(f"json_schema holds what JSON can't: {error}") from error
    except RecursionError as error:
        raise _too_deep("json_schema") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        fault = "allows nothing" if schema is False else f"is a JSON {type(schema).__name__}, not an object"
        raise ValueError(  # noqa: TRY004 - the type is right, what it says is not
            f"json_schema {fault}; give an object, or True for any JSON"
        )
    _check_schema("json_schema", schema)
    own = schema.get("x-guidance")
    options: dict[str, Json] = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {})}
    return {**schema, "x-guidance": options}


def _check_schema(field: str, schema: Json) -> None:
    """Checks that llguidance is done with a schema in a short time.

    Raises: ValueError naming `field`, the number and its limit.
    """
    weights = _Weights(schema)
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise _too_deep(field)
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


def _too_deep(field: str) -> ValueError:
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
        weight = _Weight(patterns, multiple)
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
