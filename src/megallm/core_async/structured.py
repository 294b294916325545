"""From the structured-output fields of SamplingParams to one grammar, as llguidance's JSON.

Knows what the fields may hold; what a grammar means is llguidance's business, and how large it may be stands
in `grammar_bounds.py`.
"""

import json
import re
from importlib.util import find_spec
from typing import Final, cast

from megallm.core_async.grammar_bounds import (
    Json,
    check_num_rules,
    check_rules,
    check_schema,
    check_size,
    read_json,
    too_deep,
)

FIELDS: Final = ("json_schema", "regex", "choice", "grammar")

MAX_MESSAGE: Final = 200
"""Characters of llguidance's message that an error repeats; it quotes whole expressions."""

WHITESPACE: Final = r"[\x20\t\r\n]{1,32}"
"""Between the tokens of JSON: without a bound, a small model may write nothing else until its budget ends."""

NO_FORCING: Final = '\n%llguidance {"no_forcing": true}'
"""Text that the grammar leaves no choice of is split into tokens by the model, as the rest is. Otherwise
llguidance runs ahead through it: without end where there is none, as in `start: start "a" | /b*/ start`, and
with a call of the tokenizer before each token."""


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
            lark = f"start: %json {_schema(value)}"
        case "regex":
            lark = f"start: /{_slashed(_text('regex', value))}/"
        case "choice":
            lark = f"start: /(?:{'|'.join(map(_escaped, _choices(value)))})/"
        case _:
            lark = _lark(_text("grammar", value))
    grammar = {"name": field, "lark_grammar": lark + NO_FORCING}
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def field_of(grammar: str) -> str:
    """Gives the name of the field that a grammar of `grammar_of` was made from."""
    return str(json.loads(grammar)["grammars"][0]["name"])


def shortened(message: str) -> str:
    """Gives the part of one of llguidance's messages that tells what is wrong."""
    lines = [line.strip() for line in message.splitlines()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    said = re.sub(r"^(error: |at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", said)
    return said if len(said) <= MAX_MESSAGE else said[:MAX_MESSAGE] + "..."


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is a {type(value).__name__}; give a string")
    check_size(field, value)
    if field == "grammar" and not value.strip():
        raise ValueError("grammar is empty; give rules, the first of them named start")
    return value


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
    check_size("choice", "|".join(texts))
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
    from llguidance import grammar_from  # noqa: PLC0415 - an extra

    check_num_rules(text.count("::="))  # of GBNF; converting takes their number's square
    try:
        lark = grammar_from("grammar", text)
    except ValueError as error:
        raise ValueError(f"grammar: {shortened(str(error))}") from error
    check_rules(lark)
    return lark


def _schema(value: object) -> str:
    """Gives a JSON schema as JSON text, within the bounds and with bounded whitespace."""
    describe = getattr(value, "model_json_schema", None)
    given: object = describe() if callable(describe) else value
    if not isinstance(given, dict | str | bool):
        raise TypeError(
            f"json_schema is a {type(value).__name__}; give a dict, its JSON text, True for any JSON,"
            " or a pydantic model"
        )
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"json_schema holds what JSON can't: {error}") from error
    except RecursionError as error:
        raise too_deep("json_schema") from error
    check_size("json_schema", text)
    try:
        schema, end = read_json(text.strip())
    except ValueError as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    except RecursionError as error:
        raise too_deep("json_schema") from error
    if end < len(text.strip()):
        raise ValueError(f"json_schema is no JSON: there is more behind it, at character {end:,}")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        fault = "allows nothing" if schema is False else f"is a JSON {type(schema).__name__}, not an object"
        raise ValueError(  # noqa: TRY004 - the type is right, what it says is not
            f"json_schema {fault}; give an object, or True for any JSON"
        )
    check_schema("json_schema", schema)
    own = schema.get("x-guidance")
    options: dict[str, Json] = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {})}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
