"""`megallm chat`: a conversation in the terminal, the answers as they come.

Ctrl-C ends the answer, and what came of it stays in the conversation; Ctrl-D or /exit ends the command.
Knows the public API alone; the model and the engine come in as arguments, so tests put fakes there.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, TextIO

from megallm.commands.argument_types import whole
from megallm.commands.generate import Load
from megallm.commands.sampling_options import add_sampling_options, sampling_params
from megallm.commands.steps import Steps

EXIT_OK = 0
_PROMPT = "> "
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Piece(Protocol):
    """The part of `Delta` that the command shows."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...


class Stream(Protocol):
    """An answer as it comes; closing it early aborts it."""

    def __iter__(self) -> Iterator[Piece]: ...

    def close(self) -> None:
        """Aborts the answer unless it has ended."""
        ...


class Streamer(Protocol):
    """The part of `MegatronLLM` that the command uses."""

    def stream(self, prompt: list[int], sampling_params: Any) -> Stream:  # Any: megatron's dataclass
        """Gives one prompt's output as it comes."""
        ...


type OpenEngine = Callable[[Any, Any, argparse.Namespace], AbstractContextManager[Streamer]]
"""Gives the engine round a model and its tokenizer, as the options say. Any: as in `Load`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name or a path (default: %(default)s)")
    add("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_options(parser, max_tokens=512)
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    # one request at a time, whose conversation so far stays in the cache
    parser.set_defaults(max_requests=1, buffer_gb=None, no_prefix_caching=False)


def run(
    options: argparse.Namespace,
    *,
    load: Load,
    open_engine: OpenEngine,
    stdin: TextIO,
    stdout: TextIO,
    stderr: TextIO,
) -> int:
    """Talks until the input ends; gives the exit code.

    Raises: ValueError when the model has no chat template; what loading and generating raise.
    """
    steps = Steps(stderr)
    model, tokenizer = load(options.model, options.threads)
    steps.done(f"loaded {options.model}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"{options.model} has no chat template, so it is no chat model; use megallm generate --raw"
        )
    with steps.starting(lambda: open_engine(model, tokenizer, options)) as llm:
        steps.say(_HELP)
        conversation = _Conversation(tokenizer, llm, options)
        for line in _lines(stdin, stdout):
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/clear":
                    conversation.clear()
                case command if command.startswith("/"):
                    steps.say(f"{command.split()[0]} is no command; {_HELP}")
                case text:
                    conversation.answer(text, stdout)
    return EXIT_OK


class _Conversation:
    """The messages so far, and how the next one is answered."""

    def __init__(self, tokenizer: Any, llm: Streamer, options: argparse.Namespace) -> None:  # Any: see Load
        self._tokenizer = tokenizer
        self._llm = llm
        self._params = sampling_params(options)
        self._system: str | None = options.system
        self._messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forgets everything but what the model was told first."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str, stdout: TextIO) -> None:
        """Shows the answer as it comes; on Ctrl-C what came so far is the answer."""
        self._messages.append({"role": "user", "content": text})
        prompt = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True)
        stream = self._llm.stream(prompt, self._params)
        said: list[str] = []
        ending: str | None = None
        try:
            for piece in stream:
                said.append(piece.text)
                ending = piece.finish_reason
                stdout.write(piece.text)
                stdout.flush()
        except KeyboardInterrupt:
            ending = "stopped"
        finally:
            stream.close()
        self._messages.append({"role": "assistant", "content": "".join(said)})
        note = {"length": " (cut at --max-tokens)", "stopped": " (stopped)"}.get(ending or "", "")
        stdout.write(f"{note}\n")
        stdout.flush()


def _lines(stdin: TextIO, stdout: TextIO) -> Iterator[str]:
    """Gives the lines that are typed, or piped, until they end; Ctrl-C begins a new one."""
    is_typed = stdin.isatty()
    if is_typed and stdin is sys.stdin:
        with contextlib.suppress(ImportError):  # the arrow keys then edit and find lines again
            import_module("readline")
    while True:
        try:
            line = _typed(stdin, stdout) if is_typed else stdin.readline()
        except KeyboardInterrupt:
            stdout.write("\n")
            continue
        if not line:
            return
        yield line


def _typed(stdin: TextIO, stdout: TextIO) -> str:
    """Gives the next line of a terminal with its end, or an empty text at Ctrl-D."""
    if stdin is sys.stdin and stdout is sys.stdout:
        try:
            return input(_PROMPT) + "\n"
        except EOFError:
            stdout.write("\n")
            return ""
    stdout.write(_PROMPT)
    stdout.flush()
    return stdin.readline()
