"""`megallm chat`, with a fake model and engine in place of the real ones."""

import argparse
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Self, override

import pytest
from msgspec import Struct

from megallm.commands import chat


class Piece(Struct):
    """A part of an answer."""

    text: str
    finish_reason: str | None = None


class FakeStream:
    """An answer of some pieces; one that is Ctrl-C is raised."""

    def __init__(self, pieces: list[Piece | BaseException]) -> None:
        self._pieces = pieces
        self.num_closed = 0

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def close(self) -> None:
        """Counts."""
        self.num_closed += 1


class FakeEngine:
    """Answers with what it is told to, in order, and keeps what it was asked."""

    def __init__(self, answers: list[list[Piece | BaseException]]) -> None:
        self.streams = [FakeStream(pieces) for pieces in answers]
        self.prompts: list[str] = []
        self.params: Any = None  # Any: megatron's dataclass
        self.num_open = 0

    def __enter__(self) -> Self:
        self.num_open += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.num_open -= 1

    def stream(self, prompt: list[int], sampling_params: Any) -> FakeStream:
        """Gives the next answer."""
        self.prompts.append("".join(map(chr, prompt)))
        self.params = sampling_params
        return self.streams[len(self.prompts) - 1]


class FakeTokenizer:
    """Ids are code points."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool
    ) -> list[int]:
        """Gives the turns between marks."""
        assert add_generation_prompt
        return [ord(letter) for turn in conversation for letter in f"<{turn['role']}>{turn['content']}"]


class Typed(io.StringIO):
    """A terminal, where Ctrl-C is typed as ^C."""

    @override
    def isatty(self) -> bool:
        return True

    @override
    def readline(self, size: int = -1, /) -> str:
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


class Talk(Struct):
    """What one run of the command did."""

    out: str
    err: str
    engine: FakeEngine


def talk(
    *argv: str, stdin: io.StringIO, answers: list[list[Piece | BaseException]], template: str | None = "{{ }}"
) -> Talk:
    """Runs the command."""
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    engine = FakeEngine(answers)

    def open_engine(
        model: object, tokenizer: object, options: argparse.Namespace
    ) -> AbstractContextManager[FakeEngine]:
        assert (options.max_requests, options.no_prefix_caching) == (1, False)
        return engine

    out, err = io.StringIO(), io.StringIO()
    code = chat.run(
        parser.parse_args(argv),
        load=lambda name, num_threads: (object(), FakeTokenizer(template)),
        open_engine=open_engine,
        stdin=stdin,
        stdout=out,
        stderr=err,
    )
    assert (code, engine.num_open) == (0, 0)
    return Talk(out.getvalue(), err.getvalue(), engine)


def test_answers_come_in_pieces_and_the_conversation_goes_on() -> None:
    """The model must see what it said before."""
    seen = talk(
        "--system", "Be brief.",
        stdin=io.StringIO("Hi\n\nAgain\n"),
        answers=[[Piece("Hel"), Piece("lo", "stop")], [Piece("Yes", "length")]],
    )  # fmt: skip
    assert seen.out == "Hello\nYes (cut at --max-tokens)\n"
    assert seen.engine.prompts == [
        "<system>Be brief.<user>Hi",
        "<system>Be brief.<user>Hi<assistant>Hello<user>Again",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    """A long answer is the usual reason, and the conversation is what one wants to keep."""
    seen = talk(
        stdin=io.StringIO("Count\nGo on\n"),
        answers=[[Piece("1 2"), KeyboardInterrupt()], [Piece("3", "stop")]],
    )
    assert seen.out == "1 2 (stopped)\n3\n"
    assert seen.engine.streams[0].num_closed == 1
    assert seen.engine.prompts[1] == "<user>Count<assistant>1 2<user>Go on"


def test_ctrl_c_at_the_prompt_begins_a_new_line() -> None:
    """As in every shell; leaving is Ctrl-D."""
    seen = talk(stdin=Typed("^C\nHi\n"), answers=[[Piece("Hello", "stop")]])
    assert seen.out == "> \n> Hello\n> "


def test_an_error_closes_stream_and_engine() -> None:
    """A request nobody reads would run on."""
    broken: list[Piece | BaseException] = [Piece("a"), RuntimeError("the engine failed")]
    engines: list[FakeEngine] = []
    with pytest.raises(RuntimeError, match="the engine failed"):
        engines.append(talk(stdin=io.StringIO("Hi\n"), answers=[broken]).engine)


def test_clear_forgets_and_exit_leaves() -> None:
    """What is in the way of a new question must go without loading the model again."""
    seen = talk(
        "--system", "S",
        stdin=io.StringIO("one\n/clear\n/what\ntwo\n/exit\nthree\n"),
        answers=[[Piece("1", "stop")], [Piece("2", "stop")]],
    )  # fmt: skip
    assert seen.engine.prompts == ["<system>S<user>one", "<system>S<user>two"]
    assert "megallm: /what is no command; /clear forgets" in seen.err


def test_a_model_without_a_template_is_refused_with_the_remedy() -> None:
    """A base model would ramble on, and nobody would know why."""
    with pytest.raises(ValueError, match=r"smollm2-135m has no chat template, .* megallm generate --raw"):
        talk(stdin=io.StringIO("Hi\n"), answers=[], template=None)
