"""The options of commands that say how an answer is sampled. Knows the public API alone."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from megallm.commands.argument_types import share, whole


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the options to a command's parser; `max_tokens` is the command's default."""
    add = parser.add_argument
    add(
        "--max-tokens",
        type=whole(1),
        default=max_tokens,
        metavar="N",
        help="of each answer (default: %(default)s)",
    )
    add("--temperature", type=share(None), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=whole(0), default=0, metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=share(1.0), default=0.0, metavar="P", help="draw from the likeliest share P")
    add("--seed", type=whole(0), metavar="N", help="the same seed gives the same text")
    add("--stop", action="append", metavar="TEXT", help="end an answer before TEXT; may be given again")
    add(
        "--json-schema",
        type=json_schema,
        metavar="SCHEMA",
        help="answers are JSON of this schema: a file, the schema itself, or 'true' for any JSON",
    )


def sampling_params(options: argparse.Namespace) -> Any:  # Any: megatron's dataclass is untyped
    """Gives the parameters that the options ask for."""
    from megallm import SamplingParams

    return SamplingParams(
        num_tokens_to_generate=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_words=options.stop,
        json_schema=options.json_schema,
    )


def json_schema(text: str) -> dict[str, Any] | bool:  # Any: JSON
    """Gives a schema from its JSON, or from a file of that name.

    Raises: ArgumentTypeError saying what was read and what is wrong with it.
    """
    source = text
    if not text.lstrip().startswith("{") and text != "true":
        try:
            source = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither JSON nor a readable file: {error}"
            ) from error
    try:
        return msgspec.json.decode(source, type=dict[str, Any] | bool)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} holds no schema: {error}") from error
