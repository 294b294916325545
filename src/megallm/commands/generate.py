"""`megallm generate`: answers prompts, all in one batch.

Answers go to stdout, the bar and the summary to stderr. Knows the public API alone; the model and
the engine come in as arguments, so tests put fakes there.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TextIO

from megallm.commands.argument_types import share, whole

SHOWN_PROMPT_CHARS = 200

EXIT_OK = 0
EXIT_PROMPT_FAILED = 1


class Answer(Protocol):
    """What the command shows of one prompt's `Result`."""

    @property
    def prompt_tokens(self) -> Any: ...  # Any: a tensor, or whatever has a length

    @property
    def generated_tokens(self) -> list[int]: ...

    @property
    def generated_text(self) -> str | None: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def events(self) -> Sequence[Any]: ...  # Any: megatron's events

    def failed(self) -> bool:
        """Says whether the prompt could not run; then an event's payload is the error."""
        ...


class Generator(Protocol):
    """The part of `MegatronLLM` that the command uses."""

    # Any: prompts are texts or ids, and megatron's dataclass is untyped
    def generate(self, prompts: Any, sampling_params: Any, *, progress: bool | None) -> Sequence[Answer]:
        """Gives one answer a prompt, in order."""
        ...


type Load = Callable[[str, int | None], tuple[Any, Any]]
"""Gives the model of a name, set to so many threads, and its tokenizer. Any: fakes are no torch modules."""
type OpenEngine = Callable[[Any, Any], AbstractContextManager[Generator]]
"""Gives the engine round a model and its tokenizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="a prompt")
    add("--prompts", metavar="FILE", help="a file of prompts, one a line; '-' is stdin")
    add("--model", default="smollm2-135m", help="a known name or a path (default: %(default)s)")
    add("--max-tokens", type=whole(1), default=128, metavar="N", help="of each answer (default: %(default)s)")
    add("--temperature", type=share(None), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=whole(0), default=0, metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=share(1.0), default=0.0, metavar="P", help="draw from the likeliest share P")
    add("--seed", type=whole(0), metavar="N", help="the same seed gives the same text")
    add("--stop", action="append", metavar="TEXT", help="end an answer before TEXT; may be given again")
    add("--raw", action="store_true", help="send prompts as they are, without the model's chat template")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    add("--jsonl", action="store_true", help="one JSON object a prompt instead of text")
    add("--progress", action=argparse.BooleanOptionalAction, help="a bar (default: on a terminal)")


def run(
    options: argparse.Namespace,
    *,
    load: Load,
    open_engine: OpenEngine,
    stdin: TextIO,
    stdout: TextIO,
    stderr: TextIO,
) -> int:
    """Answers the prompts of `options`; gives the exit code.

    Raises: what reading the prompts, loading and generating raise.
    """
    texts = _read_prompts(options, stdin)
    started = time.perf_counter()
    model, tokenizer = load(options.model, options.threads)
    params = _sampling_params(options)
    prompts = texts if options.raw else _apply_chat_template(texts, tokenizer)
    with open_engine(model, tokenizer) as llm:
        loaded = time.perf_counter()
        answers = llm.generate(prompts, params, progress=options.progress)
        generated_s = time.perf_counter() - loaded
    show = _jsonl if options.jsonl else _readable
    stdout.writelines(show(texts, answers))
    stdout.flush()
    print(_summary(answers, generated_s, loaded - started), file=stderr)
    return EXIT_PROMPT_FAILED if any(answer.failed() for answer in answers) else EXIT_OK


def _read_prompts(options: argparse.Namespace, stdin: TextIO) -> list[str]:
    """Gives the prompts of the arguments, then those of the file without its empty lines."""
    texts: list[str] = list(options.prompt)
    if options.prompts is not None:
        source = stdin.read() if options.prompts == "-" else Path(options.prompts).read_text(encoding="utf-8")
        texts += [line for line in source.splitlines() if line.strip()]
    if not texts:
        raise ValueError(
            "no prompts; give them as arguments, or one a line with --prompts FILE ('-' is stdin)"
        )
    return texts


def _sampling_params(options: argparse.Namespace) -> Any:  # Any: megatron's dataclass is untyped
    from megallm import SamplingParams

    return SamplingParams(
        num_tokens_to_generate=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_words=options.stop,
    )


def _apply_chat_template(texts: list[str], tokenizer: Any) -> list[list[int]] | list[str]:  # Any: see Load
    """Gives each text as a user's turn with the answer's header after it; unchanged without a template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return texts
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in texts
    ]


# ---- what is shown -----------------------------------------------------------------------------


def _jsonl(texts: list[str], answers: Sequence[Answer]) -> Iterable[str]:
    for text, answer in zip(texts, answers, strict=True):
        fields: dict[str, object] = {
            "prompt": text,
            "text": answer.generated_text,
            "token_ids": answer.generated_tokens,
            "finish_reason": answer.finish_reason,
        }
        if answer.failed():
            fields["error"] = _error_of(answer)
        yield json.dumps(fields, ensure_ascii=False) + "\n"


def _readable(texts: list[str], answers: Sequence[Answer]) -> Iterable[str]:
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True), start=1):
        shown = text if len(text) <= SHOWN_PROMPT_CHARS else text[:SHOWN_PROMPT_CHARS] + " ..."
        yield f"[{number}/{len(texts)}] {shown}\n"
        if answer.failed():
            yield f"failed: {_error_of(answer)}\n\n"
        else:
            yield f"{(answer.generated_text or '').strip()}\n"
            yield f"({len(answer.generated_tokens)} tokens, {answer.finish_reason})\n\n"


def _error_of(answer: Answer) -> str:
    errors = [event.payload for event in answer.events if isinstance(event.payload, Exception)]
    return str(errors[-1])


def _summary(answers: Sequence[Answer], generated_s: float, loaded_s: float) -> str:
    ran = [answer for answer in answers if not answer.failed()]
    num_prompt = sum(len(answer.prompt_tokens) for answer in ran)
    num_output = sum(len(answer.generated_tokens) for answer in ran)
    noun = "prompt" if len(answers) == 1 else "prompts"
    failures = f" ({len(answers) - len(ran)} failed)" if len(ran) < len(answers) else ""
    return (
        f"{len(answers)} {noun}{failures} in {generated_s:.2f} s, after {loaded_s:.1f} s of loading: "
        f"{num_prompt} prompt tokens, {num_prompt / generated_s:.1f} tokens/s; "
        f"{num_output} output tokens, {num_output / generated_s:.1f} tokens/s"
    )
