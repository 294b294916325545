"""Chat templates: rendered as they are meant, and kept in their sandbox."""

from typing import Any

import pytest

from megallm.core_async.errors import InvalidRequestError
from megallm.models.chat_template import render

USER = [{"role": "user", "content": "Hi"}]


def test_block_tags_leave_no_blank_lines() -> None:
    """Templates are written with the tags on lines of their own."""
    template = (
        "  {% for message in messages %}\n{{ message.role }}: {{ message.content }}\n  {% endfor %}\nend"
    )
    assert render(template, USER) == "user: Hi\nend"


def test_json_is_written_without_escaping_html_or_unicode() -> None:
    """Tool definitions go through this filter; the model has never seen escaped brackets."""
    tools = [{"name": "f", "text": "<b> & é"}]
    assert render("{{ tools | tojson }}", USER, tools=tools) == '[{"name": "f", "text": "<b> & é"}]'
    assert render("{{ tools | tojson(indent=1) }}", USER, tools=[1]) == "[\n 1\n]"


def test_options_have_the_defaults_that_templates_expect() -> None:
    """Under strict tests like `tools is not none` a missing variable counts as given."""
    template = "{% if tools is not none or documents is not none or add_generation_prompt %}given{% endif %}"
    assert render(template, USER) == ""
    assert render(template, USER, add_generation_prompt=True) == "given"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_null_content_is_empty_and_never_the_word_none(message: dict[str, Any]) -> None:
    """Clients send assistant messages back with null content when they hold tool calls."""
    assert render("{{ '[' + messages[0]['content'] + ']' }}", [message]) == "[]"
    assert render("{{ messages[0]['content'] }}{% if 'name' in messages[0] %}x{% endif %}", [message]) == ""


def test_loop_controls_generation_blocks_and_dates_work() -> None:
    """Published templates use all three."""
    template = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(template, USER) == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!", USER) == "Hi!"
    assert render("{{ strftime_now('%Y') | length }}", USER) == "4"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[0].content + [] }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_the_request_s_error(template: str) -> None:
    """The server must answer 400 with the template's own words, not 500."""
    with pytest.raises(InvalidRequestError, match=r"the chat template can't render the messages: .+"):
        render(template, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_can_reach_nothing_outside_its_values(template: str) -> None:
    """Templates come with files from strangers."""
    with pytest.raises(InvalidRequestError):
        render(template, USER)


def test_only_json_values_get_in() -> None:
    """An object's methods would be callable from the template."""
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content is object; .* JSON values only"):
        render("", [{"role": "user", "content": object()}])
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.parameters is set"):
        render("", USER, tools=[{"parameters": {1, 2}}])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] is str, a mapping"):
        render("", [*USER, "Hi"])  # pyright: ignore[reportArgumentType] - the mistake under test


def test_the_caller_s_messages_are_left_as_they_are() -> None:
    """They are reused for the next turn."""
    messages = [{"role": "user", "content": None, "parts": [{"a": 1}]}]
    render("{{ messages[0].parts[0].a }}", messages)
    assert messages == [{"role": "user", "content": None, "parts": [{"a": 1}]}]
