"""`megallm serve` as it is, round a fake model that breaks: `python -m tests.http.mortal serve ...`."""

import sys
from contextlib import AbstractContextManager
from typing import Any, Final, Self

from megallm import cli
from megallm.core_async.engine import Engine
from megallm.core_async.host import EngineHost
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import StepPlan
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.running import RunningServer, start_server
from tests.engines import engine_config, fake_runner, inline_worker
from tests.http.small_tokenizer import small_tokenizer

LAST_STEP: Final = 40


def die(plan: StepPlan) -> None:
    """Breaks the model once it has made some tokens."""
    if plan.step >= LAST_STEP:
        raise RuntimeError("the device at 0xdeadbeef is on fire")


class Mortal:
    """The part of `MegatronLLM` that the command uses; a program with it needs no torch."""

    def __enter__(self) -> Self:
        config = engine_config(num_blocks=1024, max_sequence_length=4096)
        runner = fake_runner(config)
        runner.before_launch = die
        self._tokenizer = TokenizerAdapter(small_tokenizer())
        self._engine = Engine(
            config, runner, self._tokenizer, make_worker=lambda each: inline_worker(each, 0.001)
        )
        self._host = EngineHost(self._engine, "asyncio")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._host.close()

    def serve(self, serve_config: Any, *, blocking: bool) -> RunningServer:  # Any: as the command's protocol
        """See MegatronLLM."""
        assert not blocking, "the command says when it is ready, so it can't block here"
        server = start_server(
            self._engine,
            self._tokenizer,
            serve_config,
            Matchers(self._tokenizer, self._engine.config.vocab_size),
            self._host.submit,
            ends_with_engine=False,
        )
        server.wait_started()
        return server


def opened(*_: object) -> AbstractContextManager[Any]:  # Any: the same
    """Gives the engine, whatever the options say."""
    return Mortal()


def loaded(name: str, num_threads: int | None) -> tuple[None, None]:
    """Gives no model and no tokenizer."""
    del name, num_threads
    return None, None


if __name__ == "__main__":
    sys.exit(
        cli.run(
            sys.argv[1:],
            load=loaded,
            open_engine=opened,
            open_serving=opened,
            stdin=sys.stdin,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )
    )
