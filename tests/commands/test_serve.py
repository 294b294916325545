"""`megallm serve`, with a fake engine and server in place of the real ones."""

import argparse
import contextlib
import errno
import io
import json
import re
import shlex
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

import pytest

from megallm.commands import serve


class FakeServer:
    """Answers at a port, until somebody waits for it."""

    def __init__(self, port: int, log: list[str]) -> None:
        self.port = port
        self._log = log
        self._on_signal: Callable[[], object] = self.wait

    @contextlib.contextmanager
    def stopping_on_signals(self, on_first: Callable[[], object]) -> Generator[None]:
        """Notes when signals are taken, and when no longer."""
        self._log.append("signals taken")
        self._on_signal = on_first
        yield
        self._log.append("signals given back")

    def end_with_engine(self) -> None:
        """Notes that it was asked for."""
        self._log.append("ends with the engine")

    def wait(self) -> None:
        """Returns at once, as if a signal had stopped it."""
        self._log.append("waited")
        self._on_signal()


class FakeEngine:
    """Serves with a fake server, and keeps what it was told."""

    def __init__(self, *, is_primary: bool = True) -> None:
        self.log: list[str] = []
        self.config: Any = None  # Any: the public dataclass, whose fields the tests read
        self._is_primary = is_primary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.log.append("closed")

    def serve(self, serve_config: Any, *, blocking: bool) -> FakeServer | None:
        """Gives the server; a rank that is not the primary one has none."""
        assert not blocking, "the command says when it is ready, so it can't block here"
        self.config = serve_config
        return FakeServer(serve_config.port or 4567, self.log) if self._is_primary else None


def served(*argv: str, engine: FakeEngine, api_key: str | None = None) -> tuple[int, str]:
    """Runs the command over a fake engine; gives the exit code and what it said."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    options = parser.parse_args(argv)
    options.api_key = options.api_key or api_key
    err = io.StringIO()

    def open_engine(model: object, tokenizer: object, options: object) -> AbstractContextManager[FakeEngine]:
        return engine

    code = serve.run(
        options, load=lambda name, num_threads: (object(), object()), open_engine=open_engine, stderr=err
    )
    return code, err.getvalue()


def test_it_says_each_step_with_its_seconds_and_then_where_it_serves() -> None:
    """Who starts a server waits for two things: which step takes so long, and the URL."""
    engine = FakeEngine()
    code, said = served("--port", "0", engine=engine)
    *steps, ready, stopping, stopped = said.splitlines()
    assert code == 0
    assert [re.sub(r"\d+\.\d s$", "N s", step) for step in steps] == [
        "megallm: loaded smollm2-135m: N s",
        "megallm: started the engine: N s",
        "megallm: started the server process: N s",
    ]
    assert re.match(r"megallm: ready after \d+\.\d s at http://127\.0\.0\.1:4567; try: curl ", ready)
    assert stopping == "megallm: stopping; answers under way have 30 s, a second Ctrl-C cuts them"
    assert re.match(r"megallm: stopped: \d+\.\d s$", stopped)


def test_the_curl_command_it_shows_is_one_that_works() -> None:
    """It is copied into a shell: quoted right, with the model's name and the chat route."""
    ready = served("--model-name", "it's mine", engine=FakeEngine())[1].splitlines()[-3]
    words = shlex.split(ready[ready.index("curl ") :])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert words[2:5] == ["-H", "Content-Type: application/json", "-d"]
    assert json.loads(words[5])["model"] == "it's mine"


def test_a_key_is_asked_for_in_the_command_and_never_shown() -> None:
    """What is said goes into logs."""
    engine = FakeEngine()
    said = served(engine=engine, api_key="a secret")[1]
    assert engine.config.api_key == "a secret"
    assert "a secret" not in said
    assert (
        'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $MEGALLM_API_KEY"' in said
    )


def test_signals_drain_the_server_before_the_engine_is_closed() -> None:
    """Closed first, it would cut the answers that are under way."""
    engine = FakeEngine()
    served(engine=engine)
    assert engine.log == ["ends with the engine", "signals taken", "waited", "signals given back", "closed"]


def test_the_options_reach_the_server() -> None:
    """Each by its own name; one that is dropped on the way shows in production alone."""
    engine = FakeEngine()
    argv = "--host :: --port 1234 --parser hermes --frontend-replicas 3 --drain-timeout 2.5 --cors-origin *"
    said = served(*argv.split(), "--verbose", engine=engine)[1]
    config = engine.config
    assert (config.host, config.port, list(config.parsers)) == ("::", 1234, ["hermes"])
    assert (config.frontend_replicas, config.drain_timeout_s) == (3, 2.5)
    assert (list(config.cors_origins), config.verbose) == (["*"], True)
    assert config.model_name == "smollm2-135m"
    assert not config.tracing
    served("--tracing", engine=engine)
    assert engine.config.tracing
    assert "3 server processes" in said
    assert "http://127.0.0.1:1234" in said


def test_a_port_that_cant_be_had_is_refused_before_anything_is_loaded() -> None:
    """Loading takes long, and somebody else's server on port 8000 is the usual mistake."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def load(name: str, num_threads: int | None) -> NoReturn:
        raise AssertionError("the model is loaded")

    def open_engine(model: object, tokenizer: object, options: object) -> NoReturn:
        raise AssertionError("the engine is started")

    def check_port(config: Any) -> NoReturn:
        raise OSError(errno.EADDRINUSE, f"port {config.port} is in use")

    with pytest.raises(OSError, match="port 8000 is in use"):
        serve.run(
            parser.parse_args([]),
            load=load,
            open_engine=open_engine,
            stderr=io.StringIO(),
            check_port=check_port,
        )


def test_a_rank_that_another_one_serves_for_ends_quietly() -> None:
    """Every rank runs the same command line."""
    engine = FakeEngine(is_primary=False)
    assert served(engine=engine)[0] == 0
    assert engine.log == ["closed"]


@pytest.mark.parametrize(
    "argv",
    [["--port", "-1"], ["--parser", "none"], ["--drain-timeout", "soon"], ["--frontend-replicas", "x"]],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(argv: list[str]) -> None:
    """Loading takes long."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(argv)
