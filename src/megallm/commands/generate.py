"""`megallm generate`: answers prompts, all in one batch.

Answers go to stdout, steps, bars and the summary to stderr. Knows the public API alone; the model and
the engine come in as arguments, so tests put fakes there.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO

from megallm.commands.argument_types import whole
from megallm.commands.prompt_input import Prompt, add_prompt_arguments, read_prompts
from megallm.commands.sampling_options import add_sampling_options, sampling_params
from megallm.commands.steps import Steps

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
    add_prompt_arguments(parser)
    add("--model", default="smollm2-135m", help="a known name or a path (default: %(default)s)")
    add_sampling_options(parser, max_tokens=128)
    add("--raw", action="store_true", help="send prompts as they are, without the model's chat template")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    add("--jsonl", action="store_true", help="one JSON object a prompt instead of text")
    add("--progress", action=argparse.BooleanOptionalAction, help="bars and steps (default: on a terminal)")


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
    prompts = read_prompts(options, stdin)
    is_watched = stderr.isatty() if options.progress is None else options.progress
    steps = Steps(stderr, are_shown=is_watched)
    model, tokenizer = load(options.model, options.threads)
    steps.done(f"loaded {options.model}")
    params = sampling_params(options)
    inputs = _model_inputs(prompts, tokenizer, is_raw=options.raw)
    with steps.starting(lambda: open_engine(model, tokenizer)) as llm:
        loaded_s = steps.total_s
        answers = _generate(llm, inputs, params, progress=is_watched)
        generated_s = steps.total_s - loaded_s
    show = _jsonl if options.jsonl else _readable
    stdout.writelines(show(prompts, answers))
    stdout.flush()
    print(_summary(answers, generated_s, loaded_s), file=stderr)  # stdout holds answers alone
    return EXIT_PROMPT_FAILED if any(answer.failed() for answer in answers) else EXIT_OK


def take_part(options: argparse.Namespace, *, load: Load, open_engine: OpenEngine) -> int:
    """Runs, on a rank that another leads, its part of what that one generates; gives the exit code.

    Raises: what loading and the engine raise.
    """
    with open_engine(*load(options.model, options.threads)):
        return EXIT_OK


def _model_inputs(
    prompts: list[Prompt],
    tokenizer: Any,
    *,
    is_raw: bool,  # Any: see Load
) -> list[str | list[int]]:
    """Gives each prompt as the model gets it.

    Raises: ValueError that says which one can't be given so.
    """
    inputs: list[str | list[int]] = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            inputs.append(_model_input(prompt, tokenizer, is_raw=is_raw))
        except ValueError as error:
            raise ValueError(f"prompt {number} of {len(prompts)}: {error}") from error
    return inputs


def _model_input(prompt: Prompt, tokenizer: Any, *, is_raw: bool) -> str | list[int]:  # Any: see Load
    """Gives a prompt as the model gets it: a text becomes a user's turn, with the answer's header after it.

    Unchanged without a template. A conversation needs one.

    Raises: ValueError for a conversation without a template.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if prompt.messages is None and (is_raw or not has_template):
        return prompt.text
    if not has_template:
        raise ValueError(
            "a prompt is given as 'messages' and the model has no chat template; give 'prompt' instead"
        )
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _generate(
    llm: Generator,
    inputs: list[str | list[int]],
    params: Any,
    *,
    progress: bool | None,  # Any: see Generator
) -> list[Answer]:
    """Gives one answer an input, in order: a call takes texts or ids, so mixed ones go in two."""
    is_text = {isinstance(each, str) for each in inputs}
    if len(is_text) == 1:
        return list(llm.generate(inputs, params, progress=progress))
    by_kind = {kind: [each for each in inputs if isinstance(each, str) is kind] for kind in (True, False)}
    answers = {kind: iter(llm.generate(each, params, progress=progress)) for kind, each in by_kind.items()}
    return [next(answers[isinstance(each, str)]) for each in inputs]


# ---- what is shown -----------------------------------------------------------------------------


def _jsonl(prompts: list[Prompt], answers: Sequence[Answer]) -> Iterable[str]:
    for prompt, answer in zip(prompts, answers, strict=True):
        fields: dict[str, object] = {
            **prompt.fields,
            **_given(prompt),
            "text": answer.generated_text,
            "token_ids": answer.generated_tokens,
            "finish_reason": answer.finish_reason,
        }
        if answer.failed():
            fields["error"] = _error_of(answer)
        yield json.dumps(fields, ensure_ascii=False) + "\n"


def _given(prompt: Prompt) -> dict[str, object]:
    if prompt.messages is not None:
        return {"messages": prompt.messages}
    return {"prompt": prompt.text if prompt.token_ids is None else prompt.token_ids}


def _readable(prompts: list[Prompt], answers: Sequence[Answer]) -> Iterable[str]:
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        text = prompt.text
        shown = text if len(text) <= SHOWN_PROMPT_CHARS else text[:SHOWN_PROMPT_CHARS] + " ..."
        yield f"[{number}/{len(prompts)}] {shown}\n"
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
