"""The command line as a whole: exit codes, one-line errors, and one run with the real model."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

import pytest

import megallm
from megallm import EngineBusy, EngineDeadError, UnsupportedModelError
from megallm.cli import COMMANDS, run
from megallm.commands.generate import Answer
from megallm.models.launched import Launched

COMMAND_NAMES = ", ".join(COMMANDS)
SOURCE_ROOT = Path(megallm.__file__).parents[1]


class FailingEngine:
    """Raises on generate."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.was_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.was_closed = True

    def generate(self, prompts: Any, sampling_params: Any, *, progress: bool | None) -> Sequence[Answer]:
        """Raises the error."""
        raise self.error


def load_nothing(name: str, num_threads: int | None) -> tuple[object, object]:
    """Stands for the model's loader."""
    return object(), object()


def no_serving(model: object, tokenizer: object, options: object) -> NoReturn:
    """Stands for the engine of a command that is not run."""
    raise AssertionError("this command serves nothing")


def outcome(*argv: str, raises: BaseException | None = None, stdout: TextIO | None = None) -> tuple[int, str]:
    """Gives exit code and stderr of a command whose engine raises."""
    engine = FailingEngine(raises or AssertionError("the engine must not be reached"))
    err = io.StringIO()

    def open_engine(model: object, tokenizer: object) -> AbstractContextManager[FailingEngine]:
        return engine

    code = run(
        argv,
        load=load_nothing,
        open_engine=open_engine,
        open_serving=no_serving,
        stdin=io.StringIO(),
        stdout=stdout or io.StringIO(),
        stderr=err,
    )
    assert engine.was_closed == (raises is not None)
    return code, err.getvalue()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the following arguments are required: COMMAND; see megallm --help"),
        ("generate", "no prompts; give them as arguments, or one a line with --prompts FILE ('-' is stdin)"),
        (
            "generate hi --top-k x",
            "argument --top-k: 'x' is not a whole number of at least 0; see megallm generate --help",
        ),
        (
            "generate --prompts /no/such/file",
            "/no/such/file can't be read: No such file or directory; give a file of prompts, one a line",
        ),
        (
            "generate hi --max-token=3 --temprature 1",
            "unknown option --temprature, did you mean --temperature?; see megallm generate --help",
        ),
        ("generate hi --bogus", "unknown option --bogus; see megallm generate --help"),
        ("info here there", "unexpected argument 'there'; see megallm info --help"),
        (
            "generat hi",
            f"no command generat, did you mean generate?; there are {COMMAND_NAMES}; see megallm --help",
        ),
    ],
    ids=[
        "no command",
        "no prompts",
        "bad value",
        "no file",
        "misspelt",
        "unknown",
        "too many",
        "wrong command",
    ],
)
def test_bad_usage_is_one_line_with_the_remedy_and_code_2(command: str, message: str) -> None:
    """A trace tells a user nothing; a script must tell its own mistake from the engine's."""
    assert outcome(*command.split()) == (2, f"megallm: {message}\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("top_k is 99,999, the vocabulary has 49,152; lower it"), 2),
        (UnsupportedModelError("layer 3 is a MambaLayer; supported: TransformerLayer"), 2),
        (EngineDeadError("the engine failed in step 3"), 3),
        (EngineBusy("1,000,000 requests wait; try again later"), 3),
        (OSError("no space left on device"), 3),
        (FileNotFoundError(2, "No such file or directory", "schema.json"), 2),
        (MemoryError(), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_of_the_engine_is_one_line_and_says_whose_fault_it_is(error: Exception, code: int) -> None:
    """Code 2: change the command. Code 3: the machine or the engine."""
    got, message = outcome("generate", "hi", raises=error)
    assert got == code
    said = {
        "MemoryError": "MemoryError; --debug shows where",
        "FileNotFoundError": "schema.json: No such file or directory",
    }
    assert message == f"megallm: {said.get(type(error).__name__, str(error))}\n"


def test_debug_adds_the_trace() -> None:
    """Whoever mends the engine needs to see where it broke, and the cause of the cause."""
    error = EngineDeadError("the engine failed in step 3")
    error.__cause__ = ZeroDivisionError("division by zero")
    code, message = outcome("generate", "hi", "--debug", raises=error)
    assert code == 3
    assert "ZeroDivisionError: division by zero" in message
    assert message.endswith("\nmegallm: the engine failed in step 3\n")


def test_options_of_the_loader_reach_it_only_where_they_are_given() -> None:
    """Each command that loads a model has them; one that goes nowhere is worse than none."""
    seen: list[dict[str, object]] = []

    def load(name: str, num_threads: int | None, **chosen: object) -> NoReturn:
        seen.append(chosen)
        raise EngineBusy("seen")

    for arguments in (["generate", "hi"], ["chat"], ["serve"]):
        for chosen in ([], ["--dtype", "float32", "--device", "cpu", "--tokenizer", "t"]):
            code = run(
                [*arguments, *chosen],
                load=load,
                open_engine=lambda model, tokenizer: FailingEngine(AssertionError()),
                open_serving=no_serving,
                stdin=io.StringIO(),
                stdout=io.StringIO(),
                stderr=io.StringIO(),
            )
            assert code == 3
    assert seen == [{}, {"dtype": "float32", "device": "cpu", "tokenizer": "t"}] * 3


def on_rank(
    rank: Launched, *argv: str, error: Exception | None = None
) -> tuple[int, str, str, dict[str, object]]:
    """Gives exit code, stdout, stderr and what the loader was given, of a command on one of several ranks."""
    out, err = io.StringIO(), io.StringIO()
    seen: dict[str, object] = {}

    def load(name: str, num_threads: int | None, **chosen: object) -> tuple[object, object]:
        seen.update(chosen)
        return object(), object()

    class Engine(FailingEngine):
        def wait_for_shutdown(self) -> None:
            if error is not None:
                raise error

    def open_engine(
        *arguments: object, **meeting: object
    ) -> AbstractContextManager[Any]:  # Any: as either command takes it
        seen.update(meeting)
        return Engine(AssertionError("only the leading rank generates"))

    code = run(
        argv,
        load=load,
        open_engine=open_engine,
        open_serving=no_serving,
        stdin=io.StringIO("a prompt"),
        stdout=out,
        stderr=err,
        find_rank=lambda: rank,
    )
    return code, out.getvalue(), err.getvalue(), seen


def test_a_rank_that_does_not_lead_takes_part_and_says_nothing() -> None:
    """Its prompts are the leading rank's: standard input may be read once."""
    command = "generate --prompts - --tp 2 --ep 2 --progress"
    assert on_rank(Launched(1, 2, 1), *command.split())[:3] == (0, "", "")
    seen = on_rank(Launched(1, 2, 1), *command.split())[3]
    assert seen == {"tp": 2, "ep": 2, "progress": False}


def test_ranks_of_other_machines_are_told_where_to_come() -> None:
    """The engine's own sockets stay on this machine unless a host is named."""
    command = "generate --prompts - --coordinator-host node0 --coordinator-port 29600"
    seen = on_rank(Launched(1, 2, 1), *command.split())[3]
    assert seen == {"coordinator_host": "node0", "coordinator_port": 29600}


def test_an_error_of_another_rank_is_one_line_with_its_number() -> None:
    """All ranks write to one terminal."""
    lost = EngineDeadError("the engine failed: out of memory")
    code, out, err, _ = on_rank(Launched(3, 4), "generate", "hi", error=lost)
    assert (code, out, err) == (3, "", "megallm: rank 3: the engine failed: out of memory\n")
    assert on_rank(Launched(1, 2), "generate", "--pp", "0")[2].startswith("megallm: rank 1: argument --pp: ")


def test_a_chat_under_a_launcher_is_refused() -> None:
    """Every process would read what is typed."""
    code, _, err, _ = on_rank(Launched(0, 2), "chat")
    assert (code, err) == (
        2,
        "megallm: chat runs in one process, and a launcher has started 2; run it without torchrun\n",
    )


def test_a_bug_keeps_its_trace() -> None:
    """Errors nobody foresaw must not be dressed up as the user's."""
    with pytest.raises(TypeError, match="a bug"):
        outcome("generate", "hi", raises=TypeError("a bug"))


def test_ctrl_c_closes_the_engine_and_exits_as_shells_expect() -> None:
    """130 stops the shell loop around the command; the engine must not be left running."""
    assert outcome("generate", "hi", raises=KeyboardInterrupt()) == (130, "megallm: interrupted\n")


def test_a_reader_that_left_ends_the_command_quietly() -> None:
    """`megallm generate ... | head -1` is no error and must print none, at the interpreter's end either."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:

        class Engine(FailingEngine):
            def generate(self, prompts: Any, sampling_params: Any, *, progress: bool | None) -> NoReturn:
                print("an answer", file=stdout, flush=True)
                raise AssertionError("the pipe has a reader")

        err = io.StringIO()
        code = run(
            ["generate", "hi"],
            load=load_nothing,
            open_engine=lambda model, tokenizer: Engine(AssertionError()),
            open_serving=no_serving,
            stdin=io.StringIO(),
            stdout=stdout,
            stderr=err,
        )
    assert (code, err.getvalue()) == (141, "")


def test_the_command_answers_with_the_demo_model(demo_model: object) -> None:
    """The newcomer's first command, whole: arguments, model, chat template, engine, text, exit code."""
    assert demo_model is not None, "fetched, so that the command finds the file in the cache"
    done = subprocess.run(
        [sys.executable, "-m", "megallm", "generate", "What is the capital of France?", "--max-tokens", "12"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1/1] What is the capital of France?\nThe capital of France is Paris")
    assert done.stderr.startswith("1 prompt in ")
    assert done.stderr.count("\n") == 1, "a warning or a trace stands beside the summary"
