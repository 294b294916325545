"""The fields that completions and chats share."""

import msgspec
import pytest

from megallm.http.bodies.schema import GenerationFields, includes_usage, is_streamed


def test_every_field_may_be_null() -> None:
    """Clients send null for what they leave open."""
    nulls = dict.fromkeys(GenerationFields.__struct_fields__)
    assert msgspec.convert(nulls, GenerationFields) == GenerationFields()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 1.5, "1", True]),
        ("temperature", [-0.1, "1", True]),
        ("top_p", [-0.1, 1.1]),
        ("top_k", [-2, 1.5]),
        ("min_p", [2]),
        ("n", [0, 1.5]),
        ("seed", [2**63, -(2**63) - 1, "1"]),
        ("presence_penalty", [2.1]),
        ("frequency_penalty", [-2.1]),
        ("stop", [1, [1]]),
        ("stream", ["yes", 1]),
        ("streaming_interval", [0, 1.5]),
        ("response_format", ["json", {"type": "xml"}]),
    ],
)
def test_what_is_out_of_range_is_no_value(field: str, values: list[object]) -> None:
    """The path of the fault is the field."""
    for value in values:
        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
            msgspec.convert({field: value}, GenerationFields)


def test_usage_comes_with_a_stream_that_asks() -> None:
    """Each level may be absent or null."""
    for options, expected in [(None, False), ({}, False), ({"include_usage": True}, True)]:
        fields = msgspec.convert({"stream": True, "stream_options": options}, GenerationFields)
        assert (is_streamed(fields), includes_usage(fields)) == (True, expected)
    assert not is_streamed(GenerationFields())
