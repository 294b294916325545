"""Prompts from every place that they may come from."""

import argparse
import io
from pathlib import Path
from typing import override

import pytest

from megallm.commands.prompt_input import Prompt, add_prompt_arguments, read_prompts


class Terminal(io.StringIO):
    """A stdin that somebody types on, and nobody should wait for."""

    @override
    def isatty(self) -> bool:
        return True

    @override
    def read(self, size: int | None = -1, /) -> str:
        raise AssertionError("the command would wait for the keyboard")


def read(*argv: str, stdin: str | None = None) -> list[Prompt]:
    """Gives the prompts of a command line."""
    parser = argparse.ArgumentParser()
    add_prompt_arguments(parser)
    return read_prompts(parser.parse_args(argv), Terminal() if stdin is None else io.StringIO(stdin))


def test_a_pipe_is_read_without_being_named_and_a_keyboard_is_not() -> None:
    """`cat questions | megallm generate` is what a shell user tries first."""
    assert [prompt.text for prompt in read(stdin="one\n\ntwo\n")] == ["one", "two"]
    assert [prompt.text for prompt in read("argument", stdin="unread")] == ["argument"]
    with pytest.raises(ValueError, match="no prompts; give them as arguments"):
        read()


def test_json_lines_give_texts_ids_and_conversations_and_keep_what_else_is_in_them(tmp_path: Path) -> None:
    """The answers must be matched to what they answer, whatever their order in a later file."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "ä", "id": 7}\n\n{"prompt": [1, 2]}\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "tag": "b"}\n',
        encoding="utf-8",
    )
    text, ids, conversation = read("--prompts", str(file))
    assert text == Prompt("ä", fields={"id": 7})
    assert (ids.text, ids.token_ids) == ("[1, 2]", [1, 2])
    assert (conversation.text, conversation.messages) == ("Hi", [{"role": "user", "content": "Hi"}])
    assert conversation.fields == {"tag": "b"}


def test_the_format_can_be_named_where_the_file_does_not_say() -> None:
    """A pipe has no name, and a line that looks like JSON may be a prompt."""
    line = '{"prompt": "x"}'
    assert read("--prompts", "-", stdin=line)[0].text == line
    assert read("--input-format", "jsonl", stdin=line)[0].text == "x"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "stdin, line 2 is no JSON object with a prompt"),
        ("[1]", "stdin, line 2 is no JSON object with a prompt: Expected `object`"),
        ('{"text": "x"}', "either 'prompt' or 'messages'"),
        ('{"prompt": "x", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": 3}', r"got `int` - at `\$\.prompt`"),
        ('{"prompt": ["a"]}', r"got `str` - at `\$\.prompt\[0\]`"),
        ('{"messages": []}', "stdin, line 2: 'messages' is empty; give at least one"),
        ('{"messages": "x"}', r"got `str` - at `\$\.messages`"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(line: str, said: str) -> None:
    """One bad line of ten thousand is not found by eye."""
    with pytest.raises(ValueError, match=said):
        read("--input-format", "jsonl", stdin=f"\n{line}\n")


def test_a_file_that_cant_be_read_is_refused_by_name_with_the_remedy(tmp_path: Path) -> None:
    """Half of all first runs name the wrong file."""
    (tmp_path / "empty.txt").write_text("\n  \n", encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes("für".encode("latin-1"))
    for name, said in {
        "absent.txt": "can't be read: No such file or directory; give a file of prompts, one a line",
        "": "can't be read: Is a directory; give a file",
        "empty.txt": "has no prompts, at most empty lines; write one a line",
        "latin1.txt": "is no UTF-8 text: byte 1 is 0xfc; save it as UTF-8",
    }.items():
        with pytest.raises(ValueError, match=f"{tmp_path / name} {said}"):
            read("--prompts", str(tmp_path / name))
    with pytest.raises(ValueError, match="stdin has no prompts, at most empty lines"):
        read("argument", "--prompts", "-", stdin="\n")
