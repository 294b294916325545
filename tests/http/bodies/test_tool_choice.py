"""Which tools may be called, and which have to be."""

import json
from typing import Any

import pytest

from megallm.http.bodies.sampling import RequestParams
from megallm.http.bodies.schema_chat import (
    ChatRequest,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
)
from megallm.http.bodies.tool_choice import NO_PARAMETERS, ToolChoice
from megallm.http.errors import RequestError
from megallm.http.parsers.pieces import Content, OutputParser, Piece, ToolCallArguments, ToolCallStart

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}}
LOOK = Tool(function=FunctionDefinition(name="look", parameters=SCHEMA))
GO = Tool(function=FunctionDefinition(name="go", description="Goes."))


def choice_of(tool_choice: Any, *tools: Tool) -> ToolChoice:  # Any: what the field may hold
    """Gives the tools of a request."""
    request = ChatRequest(messages=[Message(role="user")], tools=list(tools), tool_choice=tool_choice)
    return ToolChoice(request)


def named(name: str) -> NamedTool:
    """Gives the choice of one tool."""
    return NamedTool(function=NamedFunction(name=name))


def pieces_of(parser: OutputParser, *texts: str) -> list[Piece]:
    """Gives the pieces of an output that comes in parts."""
    return [piece for text in texts for piece in parser.feed(text)] + parser.finish()


def test_templates_get_whole_definitions() -> None:
    """Some read a description or parameters that a caller left out."""
    look, go = choice_of(None, LOOK, GO).definitions or []
    assert look["function"] == {"name": "look", "description": "", "parameters": SCHEMA}
    assert go["function"] == {"name": "go", "description": "Goes.", "parameters": NO_PARAMETERS}
    assert choice_of("none", LOOK).definitions is None
    assert choice_of(None).definitions is None


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_a_model_that_decides_is_held_to_nothing(tool_choice: str | None) -> None:
    """Its output is text, in which a parser may find calls."""
    choice, params = choice_of(tool_choice, LOOK), RequestParams()
    choice.hold(params)
    assert not params.has_grammar
    assert pieces_of(choice.parser((), {}), "a", "b") == [Content("a"), Content("b")]


def test_a_named_tool_holds_the_output_to_its_parameters() -> None:
    """So the output is the arguments, from the first character on."""
    choice, params = choice_of(named("look"), GO, LOOK), RequestParams()
    choice.hold(params)
    assert params.json_schema == SCHEMA
    start, *rest = pieces_of(choice.parser((), {}), "", '{"x"', ": 1}")
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "look")
    assert rest == [ToolCallArguments(0, '{"x"'), ToolCallArguments(0, ": 1}")]


def test_a_required_call_holds_the_output_to_a_list_of_calls() -> None:
    """What the schemas refer to by name stands at the root then."""
    choice, params = choice_of("required", GO, LOOK), RequestParams()
    choice.hold(params)
    assert params.json_schema["$defs"] == {"n": {}}
    go, look = params.json_schema["items"]["anyOf"]
    assert (go["properties"]["name"], look["properties"]["name"]) == ({"const": "go"}, {"const": "look"})
    assert "$defs" not in look["properties"]["arguments"]
    calls = json.dumps([{"name": "look", "arguments": {"x": "é"}}, {"name": "go", "arguments": {}}])
    pieces = pieces_of(choice.parser((), {}), calls[:10], calls[10:])
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["look", "go"]
    fragments = [piece.fragment for piece in pieces if isinstance(piece, ToolCallArguments)]
    assert fragments == ['{"x": "é"}', "{}"]
    ids = {piece.id for piece in pieces if isinstance(piece, ToolCallStart)}
    assert len(ids) == 2


def test_a_list_that_was_cut_off_is_content() -> None:
    """Nothing that the model said is lost."""
    parser = choice_of("required", GO).parser((), {})
    assert pieces_of(parser, '[{"name": "go", "argu') == [Content('[{"name": "go", "argu')]
    assert pieces_of(choice_of("required", GO).parser((), {})) == []


@pytest.mark.parametrize(
    ("tool_choice", "tools", "param"),
    [
        ("required", (), "tool_choice"),
        (named("look"), (), "tool_choice"),
        (named("other"), (LOOK,), "tool_choice.function.name"),
    ],
)
def test_what_is_not_there_can_not_be_called(
    tool_choice: object, tools: tuple[Tool, ...], param: str
) -> None:
    """The caller learns what is there."""
    with pytest.raises(RequestError) as caught:
        choice_of(tool_choice, *tools)
    assert caught.value.param == param


def test_a_call_and_another_format_exclude_each_other() -> None:
    """The output can't be both."""
    with pytest.raises(RequestError) as caught:
        choice_of("required", LOOK).hold(RequestParams(regex="a"))
    assert caught.value.param == "tool_choice"
