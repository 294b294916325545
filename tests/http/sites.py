"""A whole server of the fake model, engine and all, in the test's loop, with front ends as a test wants."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.kit.foreign import wait_for
from megallm.core_async.matchers import Matchers
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.serve_config import ServeConfig
from megallm.http.server import Server
from tests.engines import engine_config, fake_runner, inline_worker
from tests.fakes import FakeRunner, FakeTokenizer
from tests.http.loopback import Client
from tests.http.small_tokenizer import small_tokenizer

ANSWER_S = 60.0
"""Longer than anything here takes, also on a busy machine that starts processes."""
LONG = engine_config(num_blocks=1024, max_sequence_length=4096)


class Site:
    """A server, its engine and its port."""

    def __init__(self, engine: Engine, runner: FakeRunner, server: Server) -> None:
        self.engine = engine
        self.runner = runner
        self.server = server
        self.error: Exception | None = None
        """What `run` raised."""
        self.has_ended = anyio.Event()
        self._clients: list[Client] = []
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=ANSWER_S)

    def connect(self) -> Client:
        """Gives a connection of its own, which is closed at the end."""
        self._clients.append(Client.connect(self.server.port))
        return self._clients[-1]

    def close(self) -> None:
        """Closes the connections."""
        for client in self._clients:
            client.close()

    async def complete(self, prompt: list[int], num_tokens: int = 8) -> list[int]:
        """Gives the greedy continuation of a prompt, over HTTP."""
        response = await self.client.post("/v1/completions", json=greedy(prompt, num_tokens))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["generation_token_ids"]

    async def stream(self, prompt: list[int], num_tokens: int) -> Client:
        """Starts a stream on a connection of its own; its first event has come."""
        body = json.dumps(greedy(prompt, num_tokens) | {"stream": True})
        client = self.connect()
        await client.send(
            f"POST /v1/completions HTTP/1.1\nhost: test\ncontent-type: application/json\n"
            f"content-length: {len(body)}\n\n{body}"
        )
        await client.read_until(b"data: ")
        return client

    async def run(self) -> None:
        """Runs the server."""
        try:
            await self.server.run()
        except Exception as error:  # noqa: BLE001 - it is the test's to judge
            self.error = error
        self.has_ended.set()


def greedy(prompt: list[int], num_tokens: int) -> dict[str, Any]:  # Any: JSON
    """Gives the body of a completions request that nothing but its length ends."""
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def site(
    num_replicas: int,
    config: EngineConfig = LONG,
    *,
    tokenizer: Any = None,  # Any: as TokenizerAdapter takes it
    ends_with_engine: bool = False,
    step_s: float = 0.0,
    make_matchers: Callable[[TokenizerAdapter, int], Matchers] = Matchers,
    **fields: Any,  # Any: ServeConfig's
) -> AsyncGenerator[Site]:
    """Runs a server; stops it and its engine after the block, unless the test has."""
    runner = fake_runner(config)
    engine = Engine(config, runner, FakeTokenizer(), make_worker=lambda each: inline_worker(each, step_s))
    adapter = TokenizerAdapter(tokenizer or small_tokenizer())
    settings = ServeConfig(host="127.0.0.1", port=0, frontend_replicas=num_replicas, **fields)
    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks:
            await tasks.start(engine.run)
            matchers = make_matchers(adapter, config.vocab_size)
            server = Server(engine, adapter, settings, matchers, ends_with_engine=ends_with_engine)
            made = Site(engine, runner, server)
            tasks.start_soon(made.run)
            await wait_for(server.started)
            async with made.client:
                try:
                    yield made
                finally:
                    made.close()
            server.begin_stop(0.0)
            await made.has_ended.wait()
            await engine.shutdown()
