"""Chat templates: a conversation as the text of one prompt.

A template comes with a model file, so it is untrusted: it runs in Jinja's sandbox and sees plain
JSON values only. Environment and filters are those that Hugging Face's templates are written for.
Knows no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Never, override

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megallm.core_async.errors import InvalidRequestError

type Json = str | int | float | bool | list[Json] | dict[str, Json] | None


def render(
    template: str, conversation: Sequence[Mapping[str, Any]], **options: Any
) -> str:  # Any: JSON values
    """Gives the text that `template` makes of a conversation.

    Null fields of a message are left out, and a message without content has an empty one, so that
    templates print no "None". `options` are the template's variables; `add_generation_prompt` is
    false and `tools` and `documents` are none unless given.

    Raises: InvalidRequestError when the template is broken, refuses the conversation, or a value is
    none that JSON has.
    """
    messages = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(conversation)]
    variables: dict[str, Json] = {"add_generation_prompt": False, "tools": None, "documents": None}
    variables |= {key: _plain(value, key) for key, value in options.items()}
    try:
        return _compiled(template).render(messages=messages, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        # beside Jinja's own, what an expression of a template raises, as `"a" + []` does
        raise InvalidRequestError(f"the chat template can't render the messages: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # a type of jinja's that its own documentation overrides: any function may stand here
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}  # pyright: ignore[reportAttributeAccessIssue]
    return environment.from_string(template)


class _GenerationTag(Extension):
    """Takes `{% generation %}` blocks, which mark an assistant's words for training, as their content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's class attribute

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain_message(message: object, name: str) -> dict[str, Json]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{name} is {type(message).__name__}, a mapping with 'role' and 'content' is needed"
        )
    given: dict[str, Json] = {
        key: value for key, value in _plain_fields(message, name).items() if value is not None
    }
    return {"content": ""} | given


def _plain_fields(fields: Mapping[Any, Any], name: str) -> dict[str, Json]:  # Any: checked by `_plain`
    return {str(key): _plain(value, f"{name}.{key}") for key, value in fields.items()}


def _plain(value: Any, name: str) -> Json:  # Any: a caller's value, checked here
    """Gives a value rebuilt from plain JSON types, so that a template reaches no method of another type."""
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case Mapping():
            return _plain_fields(value, name)
        case list() | tuple():
            return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
        case _:
            raise InvalidRequestError(
                f"{name} is {type(value).__name__}; a chat template takes JSON values only"
            )


def _to_json(
    value: Json,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates call filters this way
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    """Gives JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
