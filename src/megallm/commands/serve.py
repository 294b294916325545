"""`megallm serve`: an OpenAI-compatible server over one model.

What it says goes to stderr: a line for each step of the start, with its seconds, and one with the
URL once the port answers. Knows the public API alone; the model and the engine come in as
arguments, so tests put fakes there.
"""

import argparse
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO

from megallm.commands.argument_types import share, whole
from megallm.commands.generate import Load
from megallm.commands.steps import Steps
from megallm.http.parsers.registry import PARSER_NAMES

API_KEY_VARIABLE = "MEGALLM_API_KEY"
"""Where the API key is looked for when no option gives it: other users of a machine see options."""

MAX_PORT = 65_535


class Server(Protocol):
    """The part of `RunningServer` that the command uses."""

    @property
    def port(self) -> int: ...

    def stopping_on_signals(self, on_first: Callable[[], object]) -> AbstractContextManager[None]:
        """Makes SIGINT and SIGTERM drain the server while the block runs; the first one calls `on_first`."""
        ...

    def end_with_engine(self) -> None:
        """Makes it stop once the engine has failed."""
        ...

    def wait(self) -> None:
        """Blocks until it has stopped. Raises: what the engine failed of."""
        ...


class Serving(Protocol):
    """The part of `MegatronLLM` that the command uses."""

    def serve(self, serve_config: Any, *, blocking: bool) -> Server | None:  # Any: fakes take no config
        """Gives the server once its port answers."""
        ...


type OpenEngine = Callable[[Any, Any, argparse.Namespace], AbstractContextManager[Serving]]
"""Gives the engine round a model and its tokenizer, as the options say. Any: as in `Load`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name or a path (default: %(default)s)")
    add("--model-name", metavar="NAME", help="what requests call the model (default: as --model)")
    add(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: %(default)s, this machine alone)",
    )
    add(
        "--port",
        type=whole(0, MAX_PORT),
        default=8000,
        metavar="N",
        help="0 takes a free one (default: %(default)s)",
    )
    add("--api-key", metavar="KEY", help=f"what requests must bring along (default: ${API_KEY_VARIABLE})")
    add(
        "--parser",
        action="append",
        default=[],
        metavar="NAME",
        choices=PARSER_NAMES,
        help="of the output, in order; may be given again: %(choices)s",
    )
    add(
        "--frontend-replicas",
        type=whole(0),
        default=1,
        metavar="N",
        help="processes for HTTP and text; 0: the engine's own (default: %(default)s)",
    )
    add(
        "--drain-timeout",
        type=share(None),
        default=30.0,
        metavar="S",
        help="seconds that answers under way have when it stops (default: %(default)g)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages that may call; may be given again, '*' is any",
    )
    add("--verbose", action="store_true", help="log each request")
    add(
        "--tracing",
        action="store_true",
        help="an OpenTelemetry span for each request; OTEL_* variables say where to",
    )
    _add_engine_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-requests",
        type=whole(1),
        metavar="N",
        help="answers computed at once (default: by model and memory)",
    )
    add(
        "--buffer-gb",
        type=share(None),
        metavar="GB",
        help="memory of the KV cache (default: by model and memory)",
    )
    add("--no-prefix-caching", action="store_true", help="compute shared beginnings of prompts each time")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")


def run(
    options: argparse.Namespace,
    *,
    load: Load,
    open_engine: OpenEngine,
    stderr: TextIO,
    check_port: Callable[[Any], object] | None = None,  # Any: as in Serving
) -> int:
    """Serves until SIGINT or SIGTERM, then drains; gives the exit code.

    `check_port` is called before anything is loaded, since a port that is in use is the usual mistake.

    Raises: what loading, the engine and the server raise.
    """
    from megallm.http.serve_config import ServeConfig

    name = options.model_name or options.model
    config = ServeConfig(
        host=options.host,
        port=options.port,
        parsers=options.parser,
        verbose=options.verbose,
        frontend_replicas=options.frontend_replicas,
        model_name=name,
        api_key=options.api_key,
        drain_timeout_s=options.drain_timeout,
        cors_origins=options.cors_origin,
        tracing=options.tracing,
    )
    if check_port is not None:
        check_port(config)
    steps = Steps(stderr)
    model, tokenizer = load(options.model, options.threads)
    steps.done(f"loaded {options.model}")
    with steps.starting(lambda: open_engine(model, tokenizer, options)) as llm:
        front_ends = _front_ends(options.frontend_replicas)
        with steps.showing(f"starting {front_ends}"):
            server = llm.serve(config, blocking=False)
        if server is None:  # a rank that another one serves for
            return 0
        server.end_with_engine()  # whoever watches the process starts it anew

        def say_stopping() -> None:
            steps.begin()
            steps.say(
                f"stopping; answers under way have {options.drain_timeout:g} s, a second Ctrl-C cuts them"
            )

        with server.stopping_on_signals(say_stopping):
            steps.done(f"started {front_ends}")
            url = f"http://{_shown_host(options.host)}:{server.port}"
            curl = _curl(url, name, has_key=options.api_key is not None)
            steps.say(f"ready after {steps.total_s:.1f} s at {url}; try: {curl}")
            server.wait()
    steps.done("stopped")
    return 0


def _front_ends(num_replicas: int) -> str:
    match num_replicas:
        case 0:
            return "the server in the engine's process"
        case 1:
            return "the server process"
        case _:
            return f"{num_replicas} server processes"


def _shown_host(host: str) -> str:
    """Gives the host as a client on this machine writes it."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _curl(url: str, name: str, *, has_key: bool) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
