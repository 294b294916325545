"""Prompts from arguments, a file, stdin or JSON lines. Knows text and JSON; knows no model."""

import argparse
from pathlib import Path
from typing import Any, TextIO

import msgspec
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
        help="a file of prompts, one a line; '-' is stdin, which a pipe needs not to name",
    )
    add(
        "--input-format",
        choices=_FORMATS,
        help="of that file: text, or JSON objects with 'prompt' or 'messages' (default: by its name)",
    )


def read_prompts(options: argparse.Namespace, stdin: TextIO) -> list[Prompt]:
    """Gives the prompts of the arguments, then those of the file or of stdin without empty lines.

    Raises: ValueError when there are none, the file can't be read, or a line of JSON is none.
    """
    prompts = [Prompt(text) for text in options.prompt]
    name = options.prompts
    if name is None and not prompts and not stdin.isatty():
        name = "-"
    if name is not None:
        source = _read(name, stdin)
        lines = [(number, line) for number, line in enumerate(source.splitlines(), 1) if line.strip()]
        if not lines and options.prompts is not None:
            raise ValueError(f"{_shown(name)} has no prompts, at most empty lines; write one a line")
        is_json = (options.input_format or _format_of(name)) == "jsonl"
        prompts += [_from_json(line, name, number) if is_json else Prompt(line) for number, line in lines]
    if not prompts:
        raise ValueError(
            "no prompts; give them as arguments, or one a line with --prompts FILE ('-' is stdin)"
        )
    return prompts


def _read(name: str, stdin: TextIO) -> str:
    try:
        return stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{_shown(name)} is no UTF-8 text: byte {error.start:,} is {error.object[error.start]:#04x}; "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{_shown(name)} can't be read: {error.strerror}; give a file of prompts, one a line"
        ) from error


def _shown(name: str) -> str:
    return "stdin" if name == "-" else name


def _format_of(name: str) -> str:
    return "jsonl" if name.endswith((".jsonl", ".ndjson")) else "lines"


class _Line(Struct):
    """The part of a JSON line that is the prompt."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # Any: JSON


def _from_json(line: str, name: str, number: int) -> Prompt:
    where = f"{_shown(name)}, line {number}"
    try:
        given = msgspec.json.decode(line, type=_Line)
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where} is no JSON object with a prompt: {error}") from error
    if (given.prompt is None) == (given.messages is None):
        raise ValueError(f"{where}: either 'prompt' or 'messages' is needed: {line[:80]}")
    fields = {key: value for key, value in fields.items() if key not in _Line.__struct_fields__}
    if given.messages is not None:
        if not given.messages:
            raise ValueError(f"{where}: 'messages' is empty; give at least one")
        last = given.messages[-1].get("content")
        return Prompt(str(last or ""), messages=given.messages, fields=fields)
    if isinstance(given.prompt, list):
        return Prompt(str(given.prompt), token_ids=given.prompt, fields=fields)
    return Prompt(given.prompt or "", fields=fields)
