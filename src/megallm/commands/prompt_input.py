"""Prompts from arguments, a file, stdin or JSON lines. Knows text and JSON; knows no model."""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct

_FORMATS = ("lines", "jsonl")


class Prompt(Struct):
    """One prompt as it was given."""

    text: str
    """What is shown of it."""
    messages: list[dict[str, Any]] | None = None  # Any: JSON
    """A conversation, where that was given."""
    token_ids: list[int] | None = None
    """Ids, where those were given: they go to the model as they are."""
    fields: dict[str, Any] = {}  # Any: JSON
    """What else stood beside it in its line: the answer's line has it again."""


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name prompts."""
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="a prompt")
    add(
        "--prompts",
        metavar="FILE",
        help="a file of prompts, one a line; '-' is stdin, which is read without prompts too, if not a terminal",
    )
    add(
        "--input-format",
        choices=_FORMATS,
        help="of that file: text, or JSON objects with 'prompt' (text or ids) or 'messages' (default: by its name)",
    )


def read_prompts(options: argparse.Namespace, stdin: TextIO) -> list[Prompt]:
    """Gives the prompts of the arguments, then those of the file or of stdin without empty lines.

    Raises: ValueError when there are none, or a line of JSON is none; OSError for the file.
    """
    prompts = [Prompt(text) for text in options.prompt]
    name = options.prompts
    if name is None and not prompts and not stdin.isatty():
        name = "-"
    if name is not None:
        source = stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        lines = [(number, line) for number, line in enumerate(source.splitlines(), 1) if line.strip()]
        is_json = (options.input_format or _format_of(name)) == "jsonl"
        prompts += [_from_json(line, name, number) if is_json else Prompt(line) for number, line in lines]
    if not prompts:
        raise ValueError(
            "no prompts; give them as arguments, or one a line with --prompts FILE ('-' is stdin)"
        )
    return prompts


def _format_of(name: str) -> str:
    return "jsonl" if name.endswith((".jsonl", ".ndjson")) else "lines"


def _from_json(line: str, name: str, number: int) -> Prompt:
    where = f"{'stdin' if name == '-' else name}, line {number}"
    try:
        given: Any = json.loads(line)  # Any: JSON, checked below
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise ValueError(f"{where}: an object with either 'prompt' or 'messages' is needed: {line[:80]}")
    fields = dict(given)
    if "messages" in fields:
        messages = fields.pop("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{where}: 'messages' is no list of objects")
        last = messages[-1].get("content") if messages else None
        return Prompt(str(last or ""), messages=messages, fields=fields)
    match fields.pop("prompt"):
        case str(text):
            return Prompt(text, fields=fields)
        case list(ids) if ids and all(type(token_id) is int for token_id in ids):
            return Prompt(json.dumps(ids), token_ids=ids, fields=fields)
        case other:
            raise ValueError(
                f"{where}: 'prompt' is {type(other).__name__}; a text or a list of ids is needed"
            )
