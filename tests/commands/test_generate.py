"""`megallm generate`, with a fake model and engine in place of the real ones."""

import argparse
import io
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from msgspec import Struct, field

from megallm.commands import generate


class FakeAnswer(Struct):
    """One prompt's result."""

    prompt_tokens: list[int]
    generated_tokens: list[int]
    generated_text: str
    finish_reason: str
    events: list[Any] = field(default_factory=list[Any])  # Any: as megatron's events

    def failed(self) -> bool:
        """Says so when there is an error among the events."""
        return bool(self.events)


class FakeTokenizer:
    """Ids are code points."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool
    ) -> list[int]:
        """Gives the turns between marks."""
        text = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return [ord(character) for character in text + "<assistant>" * add_generation_prompt]


class FakeEngine:
    """Answers a prompt with itself in capitals; fails prompts that say "too long"."""

    def __init__(self) -> None:
        self.prompts: list[str | list[int]] = []
        self.params: Any = None  # Any: megatron's dataclass
        self.progress: bool | None = None
        self.num_open = 0

    def __enter__(self) -> Self:
        self.num_open += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.num_open -= 1

    def generate(
        self, prompts: Sequence[str | list[int]], sampling_params: Any, *, progress: bool | None
    ) -> list[FakeAnswer]:
        """Gives the answers, and keeps what it was asked."""
        assert self.num_open == 1
        self.prompts, self.params, self.progress = list(prompts), sampling_params, progress
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: str | list[int]) -> FakeAnswer:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        ids = [ord(character) for character in text]
        if "too long" in text:
            error = ValueError("prompt has 9,999 tokens, max_sequence_length is 2,560; shorten it")
            return FakeAnswer(
                ids, [], "", "error", [SimpleNamespace(payload=None), SimpleNamespace(payload=error)]
            )
        return FakeAnswer(ids, ids[::-1], text.upper(), "stop")


class Run(Struct):
    """What one run of the command did."""

    code: int
    out: str
    err: str
    engine: FakeEngine
    loaded: list[tuple[str, int | None]]


def run(*argv: str, stdin: str = "", chat_template: str | None = None) -> Run:
    """Runs the command with these arguments."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    generate.add_arguments(parser)
    engine = FakeEngine()
    loaded: list[tuple[str, int | None]] = []

    def load(name: str, num_threads: int | None) -> tuple[object, FakeTokenizer]:
        loaded.append((name, num_threads))
        return "the model", FakeTokenizer(chat_template)

    def open_engine(model: object, tokenizer: FakeTokenizer) -> AbstractContextManager[FakeEngine]:
        assert model == "the model"
        return engine

    out, err = io.StringIO(), io.StringIO()
    options = parser.parse_args(argv)
    code = generate.run(
        options, load=load, open_engine=open_engine, stdin=io.StringIO(stdin), stdout=out, stderr=err
    )
    assert engine.num_open == 0
    return Run(code, out.getvalue(), err.getvalue(), engine, loaded)


def test_prompts_and_answers_are_readable_and_in_order() -> None:
    """Whoever reads the output must see which answer belongs to which prompt."""
    seen = run("first one", "second")
    assert (
        seen.out
        == "[1/2] first one\nFIRST ONE\n(9 tokens, stop)\n\n[2/2] second\nSECOND\n(6 tokens, stop)\n\n"
    )
    assert seen.code == 0


def test_a_long_prompt_is_shown_shortened_and_sent_whole() -> None:
    """An answer below pages of prompt is not readable; an answer to half a prompt is wrong."""
    prompt = "word " * 100
    seen = run(prompt)
    assert seen.engine.prompts == [prompt]
    assert seen.out.splitlines()[0] == f"[1/1] {prompt[:200]} ..."


def test_prompts_come_from_arguments_then_from_a_file_without_its_empty_lines(tmp_path: Path) -> None:
    """An empty line between prompts must not become a prompt, which would fail."""
    file = tmp_path / "prompts.txt"
    file.write_text("from the file: ä\n\n  \nlast\n", encoding="utf-8")
    seen = run("argument", "--prompts", str(file))
    assert seen.engine.prompts == ["argument", "from the file: ä", "last"]


def test_a_dash_reads_prompts_from_stdin() -> None:
    """`sort prompts | megallm generate --prompts -` is how a shell would use it."""
    assert run("--prompts", "-", stdin="one\ntwo\n").engine.prompts == ["one", "two"]


def test_no_prompt_is_an_error_before_the_model_is_loaded() -> None:
    """Loading takes seconds; a mistake in the command must not."""
    with pytest.raises(ValueError, match="no prompts; give them as arguments"):
        run(stdin="\n\n")


def test_the_chat_template_wraps_each_prompt() -> None:
    """A chat model answers as one only when it sees its own marks."""
    seen = run("hi", chat_template="{{ messages }}")
    assert seen.engine.prompts == [[ord(character) for character in "<user>hi<assistant>"]]
    assert json.loads(run("hi", "--jsonl", chat_template="{{ messages }}").out)["prompt"] == "hi"


@pytest.mark.parametrize(("arguments", "template"), [(["--raw"], "{{ messages }}"), ([], None)])
def test_prompts_go_unchanged_when_asked_or_when_there_is_no_template(
    arguments: list[str], template: str | None
) -> None:
    """A base model has no template, and a chat model's user may want to write the marks himself."""
    assert run("hi", *arguments, chat_template=template).engine.prompts == ["hi"]


def test_options_reach_loader_engine_and_sampling_parameters() -> None:
    """An option that goes nowhere is worse than none."""
    options = (
        "--model m --threads 2 --max-tokens 7 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 3 --progress"
    )
    seen = run("hi", *options.split(), "--stop", "\n\n", "--stop", "END")
    params = seen.engine.params
    assert seen.loaded == [("m", 2)]
    assert seen.engine.progress is True
    assert (params.num_tokens_to_generate, params.temperature, params.top_k, params.top_p) == (7, 0.5, 4, 0.9)
    assert (params.seed, params.stop_words) == (3, ["\n\n", "END"])


def test_the_defaults_are_greedy_and_show_no_bar_in_a_log_file() -> None:
    """The same command gives the same text, and a log holds its summary alone."""
    seen = run("hi")
    params = seen.engine.params
    assert seen.loaded == [("smollm2-135m", None)]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 0, 0.0, None)
    assert seen.engine.progress is False
    assert seen.err.startswith("1 prompt in ")


def test_steps_and_a_bar_are_shown_when_asked_for() -> None:
    """Nobody should wonder for ten seconds whether it hangs, for one prompt no more than for a thousand."""
    seen = run("hi", "--progress")
    assert seen.engine.progress is True
    assert [line.rpartition(":")[0] for line in seen.err.splitlines()[:2]] == [
        "megallm: loaded smollm2-135m",
        "megallm: started the engine",
    ]


def test_jsonl_gives_one_object_a_prompt() -> None:
    """Programs read it: a line an answer, every character as it is, errors beside the others."""
    seen = run("zwölf\tübel", "much too long", "--jsonl")
    first, second = [json.loads(line) for line in seen.out.splitlines()]
    assert first == {
        "prompt": "zwölf\tübel",
        "text": "ZWÖLF\tÜBEL",
        "token_ids": [ord(character) for character in "lebü\tflöwz"],
        "finish_reason": "stop",
    }
    assert "zwölf" in seen.out
    assert second["finish_reason"] == "error"
    assert second["error"] == "prompt has 9,999 tokens, max_sequence_length is 2,560; shorten it"


def test_a_failed_prompt_is_shown_beside_the_others_and_in_the_exit_code() -> None:
    """One bad line of a file must not cost the answers to the rest, nor go unnoticed by a script."""
    seen = run("good", "too long", "fine")
    assert seen.code == 1
    assert "[2/3] too long\nfailed: prompt has 9,999 tokens" in seen.out
    assert "[3/3] fine\nFINE\n" in seen.out
    assert seen.err.startswith("3 prompts (1 failed) in ")


def test_the_summary_counts_tokens_and_seconds_on_stderr() -> None:
    """It is the figure a newcomer looks for, and must not end up in a file of answers."""
    seen = run("four", "sixsix")
    assert seen.err.startswith("2 prompts in ")
    assert "s of loading: 10 prompt tokens, " in seen.err
    assert "; 10 output tokens, " in seen.err
    assert seen.err.count("tokens/s") == 2
    assert "tokens/s" not in seen.out


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--max-tokens", "0", "'0' is not a whole number of at least 1"),
        ("--max-tokens", "many", "'many' is not a whole number of at least 1"),
        ("--top-k", "-1", "'-1' is not a whole number of at least 0"),
        ("--threads", "1.5", "'1.5' is not a whole number of at least 1"),
        ("--temperature", "nan", "'nan' is not a number of at least 0"),
        ("--temperature", "inf", "'inf' is not a number of at least 0"),
        ("--top-p", "1.01", "'1.01' is not a number from 0 to 1"),
        ("--top-p", "", "'' is not a number from 0 to 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(option: str, value: str, wanted: str) -> None:
    """The command line is where the mistake was made, so it is where it is explained."""
    with pytest.raises(argparse.ArgumentError, match=wanted):
        run("hi", f"{option}={value}")


def test_json_lines_in_give_json_lines_out_that_can_be_told_apart(tmp_path: Path) -> None:
    """A batch of ten thousand is written by one program and read by another."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "id": 1}\n{"prompt": [104, 105], "id": 2}\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "id": 3}\n',
        encoding="utf-8",
    )
    seen = run("--prompts", str(file), "--jsonl", "--raw", chat_template="{{ messages }}")
    lines = [json.loads(line) for line in seen.out.splitlines()]
    assert [line["id"] for line in lines] == [1, 2, 3]
    assert [line["text"] for line in lines] == ["ONE", "HI", "<USER>HI<ASSISTANT>"]
    assert lines[1]["prompt"] == [104, 105]
    assert lines[2]["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_conversation_needs_a_template() -> None:
    """Its turns joined some other way would be another model's format."""
    lines = '{"prompt": "Hi"}\n{"messages": [{"role": "user", "content": "Hi"}]}'
    with pytest.raises(ValueError, match=r"^prompt 2 of 2: .* no chat template; give 'prompt' instead"):
        run("--input-format", "jsonl", stdin=lines)


def test_a_schema_reaches_the_sampling_parameters() -> None:
    """An option that goes nowhere is worse than none."""
    assert run("hi", "--json-schema", '{"type": "object"}').engine.params.json_schema == {"type": "object"}
