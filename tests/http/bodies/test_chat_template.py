"""Conversations through the tokenizer's own template."""

from types import SimpleNamespace
from typing import Any

import jinja2
import msgspec
import pytest

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.bodies.chat_template import OPTIONS, ChatTemplate, template_options
from megallm.http.bodies.schema_chat import ChatRequest, Message
from megallm.http.errors import RequestError
from tests.byte_tokenizer import ByteTokenizer
from tests.http.serving import ChatTokenizer


class DeveloperTokenizer(ChatTokenizer):
    """One whose template knows developers."""

    chat_template = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"


class FailingTokenizer(ChatTokenizer):
    """One whose template raises."""

    error: Exception = ValueError("secret")

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = False, **options: Any
    ) -> str:  # Any: JSON
        """Raises."""
        raise self.error


class MegatronTokenizer(ByteTokenizer):
    """Megatron's wrapper round a Hugging Face tokenizer."""

    def __init__(self) -> None:
        self._tokenizer = SimpleNamespace(tokenizer=ChatTokenizer())


def template_of(tokenizer: object) -> ChatTemplate:
    """Gives the template of a tokenizer."""
    return ChatTemplate(TokenizerAdapter(tokenizer))


def messages(text: str) -> list[Message]:
    """Reads messages as a body has them."""
    return msgspec.json.decode(text, type=list[Message])


def rendered(tokenizer: object, text: str, **options: object) -> str:
    """Gives the prompt of some messages."""
    template = template_of(tokenizer)
    return template.render(
        template.messages_of(messages(text)), tools=None, options=options, begins_answer=True
    )


USER = '[{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize("tokenizer", [ChatTokenizer(), MegatronTokenizer()], ids=["own", "megatron's"])
def test_the_tokenizers_own_template_is_used(tokenizer: object) -> None:
    """Also that of the Hugging Face tokenizer inside megatron's."""
    assert rendered(tokenizer, USER) == "<|start|>user:hi<|end|><|start|>assistant:"
    assert "think" in rendered(tokenizer, USER, enable_thinking=True)


def test_without_a_template_contents_are_joined() -> None:
    """As upstream does."""
    text = '[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]'
    assert rendered(ByteTokenizer(), text) == "a\nb"


def test_messages_become_what_templates_expect() -> None:
    """Text, arguments as objects, no nulls; a text of arguments that is no object stays one."""
    text = """[
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}},
            {"function": {"name": "g", "arguments": "[1"}},
            {"function": {"name": "h", "arguments": {"y": 2}}},
            {"function": {"name": "i"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "t", "name": "f"}]"""
    developer, assistant, tool = template_of(ChatTokenizer()).messages_of(messages(text))
    assert developer == {"role": "system", "content": "a\nb"}
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "r"
    arguments = [call["function"]["arguments"] for call in assistant["tool_calls"]]
    assert arguments == [{"x": 1}, "[1", {"y": 2}, {}]
    assert [call.get("id") for call in assistant["tool_calls"]] == ["1", None, None, None]
    assert tool == {"role": "tool", "content": "t", "name": "f", "tool_call_id": "1"}


def test_a_template_that_knows_developers_gets_them() -> None:
    """Others would refuse the role."""
    assert rendered(DeveloperTokenizer(), '[{"role": "developer", "content": "a"}]') == "D"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ('{"type": "image_url", "image_url": {"url": "http://x"}}', "messages[0].content[0].type"),
        ('{"type": "text"}', "messages[0].content[0].text"),
    ],
)
def test_parts_that_are_no_text_are_refused(part: str, param: str) -> None:
    """Nothing is ever fetched, and nothing is left out in silence."""
    with pytest.raises(RequestError) as caught:
        template_of(ChatTokenizer()).messages_of(messages(f'[{{"role": "user", "content": [{part}]}}]'))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("error", "told"),
    [(jinja2.TemplateError("roles must alternate"), "roles must alternate"), (TypeError("secret"), "")],
)
def test_what_a_template_says_is_told_and_what_breaks_it_is_not(error: Exception, told: str) -> None:
    """Templates refuse conversations in words for the caller."""
    tokenizer = FailingTokenizer()
    tokenizer.error = error
    with pytest.raises(RequestError) as caught:
        rendered(tokenizer, USER)
    assert caught.value.param == "messages"
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "messages", "tools"])
def test_only_variables_of_templates_may_be_set(name: str) -> None:
    """A caller's template is code, and `tokenize` would block the server."""
    request = ChatRequest(messages=[], chat_template_kwargs={"enable_thinking": True, name: 1})
    with pytest.raises(RequestError) as caught:
        template_options(request)
    assert caught.value.param == f"chat_template_kwargs.{name}"
    assert template_options(ChatRequest(messages=[])) == {}
    allowed = {"enable_thinking": False}
    assert template_options(ChatRequest(messages=[], chat_template_kwargs=dict(allowed))) == allowed
    assert "enable_thinking" in OPTIONS
