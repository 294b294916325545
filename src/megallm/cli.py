"""The command line: `megallm COMMAND`; `megallm COMMAND --help` lists its options.

Answers go to stdout; the bar, the summary and errors, one line each, to stderr. Exit codes: 0 all went
well, 1 some prompt failed, 2 bad usage (an option, a file, a value), 3 the model or the engine failed,
130 Ctrl-C, 141 the reader of stdout left; `bench` has those of the benchmarks.

Under torchrun, `generate` and `serve` run a model over all its processes: the first answers, the others
take part and say no more than why they failed.
"""

import argparse
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TextIO

from msgspec import Struct, structs

from megallm import MegaLLMError
from megallm.commands import bench, chat, completion, generate, model_card, serve
from megallm.commands.argument_types import DTYPES, whole
from megallm.commands.parser import OneLineParser, ShowVersion, refuse_left_over, refuse_unknown_command
from megallm.commands.ranks import leading, opening, taking_part
from megallm.models.launched import Launched, launched

EXIT_USAGE = 2
EXIT_ENGINE = 3
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


type Loader = Callable[..., tuple[Any, Any]]
"""What `generate.Load` is, and takes the options of `LOADING` that are given by keyword. Any: as there."""


class Surroundings(Struct, frozen=True):
    """What a command works with: the model's loader, the engines, the streams."""

    load: generate.Load
    open_engine: generate.OpenEngine
    open_serving: Callable[[Any, Any, argparse.Namespace], AbstractContextManager[Any]]
    """Any: a model and tokenizer as in `Load`, and the engine as `serve` or `chat` takes it."""
    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    leads: bool = True
    """No other rank does."""
    check_port: Callable[[Any], object] | None = None
    """Refuses a `ServeConfig` whose port can't be had. Any: its module takes a while to import."""


class Command(Struct, frozen=True):
    """One command: what `--help` says of it, its arguments, and how it is run."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Surroundings], int]
    loads_model: bool = False
    """It has the options of `LOADING`, too."""
    runs_on_ranks: bool = False
    """And those of `SPLITTING` and `MEETING`."""


def _generate(options: argparse.Namespace, at: Surroundings) -> int:
    if not at.leads:
        return generate.take_part(options, load=at.load, open_engine=at.open_engine)
    streams = {"stdin": at.stdin, "stdout": at.stdout, "stderr": at.stderr}
    return generate.run(options, load=at.load, open_engine=at.open_engine, **streams)


def _chat(options: argparse.Namespace, at: Surroundings) -> int:
    streams = {"stdin": at.stdin, "stdout": at.stdout, "stderr": at.stderr}
    return chat.run(options, load=at.load, open_engine=at.open_serving, **streams)


def _serve(options: argparse.Namespace, at: Surroundings) -> int:
    options.api_key = options.api_key or os.environ.get(serve.API_KEY_VARIABLE) or None
    check_port = at.check_port if at.leads else None
    return serve.run(
        options, load=at.load, open_engine=at.open_serving, stderr=at.stderr, check_port=check_port
    )


def _model_card(options: argparse.Namespace, at: Surroundings) -> int:
    return model_card.run(options, stdout=at.stdout)


def _bench(options: argparse.Namespace, at: Surroundings) -> int:
    del at  # the benchmarks are a process of their own
    return bench.run(options)


def _completion(options: argparse.Namespace, at: Surroundings) -> int:
    return completion.run(options, parser=_parser()[0], stdout=at.stdout)


LOADING: dict[str, dict[str, Any]] = {  # Any: what argparse takes
    "tokenizer": {"help": "the folder or file of the tokenizer, where it is not the model's"},
    "dtype": {
        "choices": DTYPES,
        "help": "of the weights: %(choices)s (default: float32 on a CPU, bfloat16 on a GPU)",
    },
    "device": {"help": "cpu, cuda, cuda:1 (default: the GPU where there is one)"},
}
"""Options of every command that loads a model: arguments of `load_model` by the same names."""

SPLITTING: dict[str, dict[str, Any]] = {  # Any: the same
    name: {"type": whole(1), "metavar": "N", "help": f"ranks of {what}, under torchrun (default: 1)"}
    for name, what in (
        ("tp", "tensor parallelism"),
        ("pp", "pipeline parallelism"),
        ("ep", "expert parallelism"),
    )
}
"""The same of those that run on many ranks."""

MEETING: dict[str, dict[str, Any]] = {  # Any: the same
    "coordinator-host": {
        "metavar": "HOST",
        "help": "where rank 0 listens for ranks of other machines, under torchrun (default: loopback)",
    },
    "coordinator-port": {
        "type": whole(1),
        "metavar": "PORT",
        "help": "the same, its port (default: one that is free)",
    },
}
"""And arguments of `MegatronLLM`, of the same commands."""

COMMANDS = {
    "generate": Command(
        "answer prompts, all in one batch",
        generate.add_arguments,
        _generate,
        loads_model=True,
        runs_on_ranks=True,
    ),
    "chat": Command("talk with a model in the terminal", chat.add_arguments, _chat, loads_model=True),
    "serve": Command(
        "serve the OpenAI API over HTTP", serve.add_arguments, _serve, loads_model=True, runs_on_ranks=True
    ),
    "info": Command("show what a checkpoint holds and costs", model_card.add_arguments, _model_card),
    "bench": Command("run the benchmarks of a checkout", bench.add_arguments, _bench),
    "completion": Command("write a script that completes commands", completion.add_arguments, _completion),
}
"""Every command, in the order that `--help` lists them."""


def main() -> int:
    """Runs this process's command line; gives the exit code."""
    code = run(
        sys.argv[1:],
        load=_load_model,
        open_engine=_open_engine,
        open_serving=_open_serving,
        stdin=sys.stdin,
        stdout=sys.stdout,
        stderr=sys.stderr,
        find_rank=_find_rank,
        check_port=lambda config: config.listen().close(),
    )
    if code == 0 and "torch" in sys.modules:
        _leave_ranks()
    return code


def run(
    argv: Sequence[str],
    *,
    load: Loader,
    open_engine: generate.OpenEngine,
    open_serving: Callable[[Any, Any, argparse.Namespace], AbstractContextManager[Any]],  # Any: above
    stdin: TextIO,
    stdout: TextIO,
    stderr: TextIO,
    find_rank: Callable[[], Launched] = Launched,
    check_port: Callable[[Any], object] | None = None,  # Any: see Surroundings
) -> int:
    """Runs one command line with this loader and engine, as a rank; gives the exit code."""
    is_debug = "--debug" in argv
    rank = Launched()

    def failed(error: Exception, code: int) -> int:
        if is_debug:
            traceback.print_exception(error, file=stderr)
        said = str(error)
        if isinstance(error, OSError) and error.strerror:  # without its number
            said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        message = " ".join(said.split()) or f"{type(error).__name__}; --debug shows where"
        who = f"rank {rank.rank}: " if rank.rank else ""
        print(f"megallm: {who}{message}", file=stderr)
        return code

    try:
        rank = find_rank()
        options = _parsed(argv)
        chosen = _chosen(options, *LOADING, *SPLITTING, "progress")
        if rank.rank and "progress" in chosen:
            chosen["progress"] = False
        loader = partial(load, **chosen)
        meeting = _chosen(options, *MEETING)
        opening_engine, opening_serving = (partial(each, **meeting) for each in (open_engine, open_serving))
        at = Surroundings(
            loader, opening_engine, opening_serving, stdin, stdout, stderr, check_port=check_port
        )
        return COMMANDS[options.command].run(options, _on_rank(at, options, rank))
    except KeyboardInterrupt:
        if not rank.rank:
            print("megallm: interrupted", file=stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader left (`| head`): the interpreter's own flush at exit must not fail on the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return EXIT_PIPE_CLOSED
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        return failed(error, EXIT_USAGE)
    except (MegaLLMError, RuntimeError, OSError, ImportError, MemoryError) as error:
        return failed(error, EXIT_ENGINE)


def _chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:  # Any: values of many types
    """Gives those of the options that the command has and that have a value, as keyword arguments."""
    given = {name: vars(options).get(name) for name in (name.replace("-", "_") for name in names)}
    return {name: value for name, value in given.items() if value is not None}


def _on_rank(at: Surroundings, options: argparse.Namespace, rank: Launched) -> Surroundings:
    """Gives what a command works with on one of several ranks.

    Raises: ValueError for a command that runs in one process.
    """
    if rank.num_processes == 1 or not COMMANDS[options.command].loads_model:
        return at
    if not COMMANDS[options.command].runs_on_ranks:
        raise ValueError(
            f"{options.command} runs in one process, and a launcher has started {rank.num_processes}; run it "
            "without torchrun"
        )
    way = taking_part if rank.rank else leading
    led = structs.replace(
        at, open_engine=opening(at.open_engine, way), open_serving=opening(at.open_serving, way)
    )
    if not rank.rank:
        return led
    return structs.replace(led, stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), leads=False)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser()
    refuse_unknown_command(parser, argv, COMMANDS)
    options, left_over = parser.parse_known_args(argv)
    refuse_left_over(commands[options.command], left_over)
    return options


def _parser() -> tuple[OneLineParser, dict[str, OneLineParser]]:
    """Gives the parser, and the one of each command."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="megallm", description=__doc__, formatter_class=as_written)
    parser.add_argument("--version", action=ShowVersion)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        described = f"{command.summary.capitalize()}."
        sub = commands.add_parser(name, help=command.summary, description=described)
        sub.add_argument("--debug", action="store_true", help="errors with their trace")
        command.add_arguments(sub)
        if command.loads_model:
            for option, settings in LOADING.items():
                sub.add_argument(f"--{option}", **settings)
        if command.runs_on_ranks:
            for option, settings in (SPLITTING | MEETING).items():
                sub.add_argument(f"--{option}", **settings)
    return parser, commands.choices


def _find_rank() -> Launched:
    rank = launched()
    if rank.rank:
        # it has nothing to say at Ctrl-C, and Python's own way waits for collectives, which may never end
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return rank


def _leave_ranks() -> None:
    """Takes leave of the other ranks, without which NCCL warns of leaks."""
    from torch import distributed

    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.destroy_process_group()


# ---- the real model and engine; both imports take seconds, which `--help` need not wait for -------


def _load_model(name: str, num_threads: int | None, **chosen: Any) -> tuple[Any, Any]:  # Any: see Load
    from megallm import load_model

    model, tokenizer = load_model(name, **chosen)
    if num_threads is not None:
        import torch  # after a wrong name was refused, which needs no import of seconds

        torch.set_num_threads(num_threads)
    # what is there now stays: else a collection of all of it stops everything for a fifth of a second
    gc.collect()
    gc.freeze()
    return model, tokenizer


def _open_engine(
    model: Any, tokenizer: Any, **meeting: Any
) -> AbstractContextManager[generate.Generator]:  # Any: the same
    from megallm import MegatronLLM

    return MegatronLLM(model=model, tokenizer=tokenizer, **meeting)


def _open_serving(
    model: Any, tokenizer: Any, options: argparse.Namespace, **meeting: Any
) -> AbstractContextManager[serve.Serving]:  # Any: the same
    from megallm import InferenceConfig, MegatronLLM

    given = {"max_requests": options.max_requests, "buffer_size_gb": options.buffer_gb}
    config = InferenceConfig(
        enable_prefix_caching=not options.no_prefix_caching,
        **{name: value for name, value in given.items() if value is not None},
    )
    return MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config, **meeting)
