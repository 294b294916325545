"""The options that say how an answer is sampled."""

import argparse
from pathlib import Path

import pytest

from megallm.commands.sampling_options import add_sampling_options, json_schema, sampling_params


def test_options_become_the_parameters_of_their_names() -> None:
    """An option that goes nowhere is worse than none."""
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, max_tokens=9)
    schema = '{"type": "object"}'
    options = parser.parse_args(
        ["--temperature", "0.5", "--top-k", "4", "--seed", "3", "--stop", "a", "--json-schema", schema]
    )
    params = sampling_params(options)
    assert (params.num_tokens_to_generate, params.temperature, params.top_k, params.seed) == (9, 0.5, 4, 3)
    assert (params.stop_words, params.json_schema) == (["a"], {"type": "object"})


def test_a_schema_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    """Real schemas are too long for a line, short ones not worth a file."""
    (tmp_path / "a.json").write_text('{"type": "array"}', encoding="utf-8")
    assert json_schema(str(tmp_path / "a.json")) == {"type": "array"}
    assert json_schema(' {"type": "array"}') == {"type": "array"}
    assert json_schema("true") is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("absent.json", "'absent.json' is neither JSON nor a readable file"),
        ("{", "holds no schema"),
    ],
)
def test_what_is_no_schema_is_refused_with_what_was_read(text: str, said: str) -> None:
    """Before the model is loaded."""
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        json_schema(text)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """The wrong file of two."""
    (tmp_path / "a.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(argparse.ArgumentTypeError, match=r"holds no schema: Expected `bool"):
        json_schema(str(tmp_path / "a.json"))
