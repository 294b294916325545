"""The parsers by name, and the chain of those that a server was started with. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from megallm.http.parsers.hermes import HermesSyntax
from megallm.http.parsers.pieces import Content, OutputParser, Piece
from megallm.http.parsers.qwen3_coder import Qwen3CoderSyntax
from megallm.http.parsers.reasoning import ReasoningParser
from megallm.http.parsers.tool_calls import CallSyntax, ToolCallParser

REASONING_NAMES = ("deepseek-r1-reasoning", "nemotron-v3-reasoning")
TOOL_NAMES = ("hermes", "qwen3-coder-tool")
PARSER_NAMES = (*REASONING_NAMES, *TOOL_NAMES)

# Any: a tool's definition, and what a chat template is given, are a caller's JSON
type Tools = Sequence[Mapping[str, Any]]
type TemplateOptions = Mapping[str, Any]


def check_parsers(names: Sequence[str]) -> None:
    """Raises: ValueError for an unknown name; it lists the known ones."""
    for name in names:
        if name not in PARSER_NAMES:
            raise ValueError(f"parser {name!r} is unknown; known are {', '.join(PARSER_NAMES)}")


def make_parser(
    names: Sequence[str], tools: Tools | None = None, template_options: TemplateOptions | None = None
) -> OutputParser:
    """Gives a new parser for one output: what one calls content, the next one takes apart further.

    Without tools that the model may call, calls are content.

    Args:
        names: The order they are applied in.
        tools: Definitions as the chat API takes them.
        template_options: `chat_template_kwargs`; `enable_thinking` and `force_nonempty_content` count.

    Raises: ValueError for an unknown name.
    """
    check_parsers(names)
    syntaxes = {name: _syntax(name, tools) for name in names if tools and name in TOOL_NAMES}
    starts = tuple(markers.start for syntax in syntaxes.values() for markers in syntax.sections)
    options = template_options or {}
    chain: OutputParser = _PlainParser()
    for name in reversed(names):
        if name in REASONING_NAMES:
            chain = _Chain(_reasoning(name, starts, options), chain)
        elif name in syntaxes:
            chain = _Chain(ToolCallParser(syntaxes[name]), chain)
    return chain


def _syntax(name: str, tools: Tools | None) -> CallSyntax:
    return HermesSyntax() if name == "hermes" else Qwen3CoderSyntax(tools or ())


def _reasoning(name: str, starts: tuple[str, ...], options: TemplateOptions) -> OutputParser:
    if name != "nemotron-v3-reasoning":
        return ReasoningParser(ends_before=starts)
    is_off = options.get("enable_thinking") is False
    return ReasoningParser(
        ends_before=starts,
        begins_inside=not is_off,
        fills_content=is_off or options.get("force_nonempty_content") is True,
    )


class _PlainParser:
    """Calls everything content."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Chain:
    """Passes what one parser calls content through another."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Piece]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, pieces: list[Piece]) -> list[Piece]:
        passed: list[Piece] = []
        for piece in pieces:
            passed += self._second.feed(piece.text) if isinstance(piece, Content) else [piece]
        return passed
