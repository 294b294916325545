"""A whole server on loopback whose model says what a test wants, and the official client of it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from anyio import to_thread
from openai import AsyncOpenAI, OpenAI

from tests.byte_tokenizer import ByteTokenizer
from tests.http.serving import Script, eventually, expected_tokens
from tests.http.sites import ANSWER_S, LONG, Site, site
from tests.http.small_tokenizer import small_tokenizer

KEY = "sk-of-a-test"


class Talk:
    """A server, and what its model says."""

    def __init__(self, here: Site) -> None:
        self.here = here
        self.tokenizer = small_tokenizer()
        self._script = Script(cast("ByteTokenizer", self.tokenizer))  # cast: it needs no more than that one
        here.runner.choose = self._script.choose
        self.url = f"http://127.0.0.1:{here.server.port}/v1"

    def answer(self, prompt: str, answer: str) -> None:
        """Makes an answer follow a prompt."""
        self._script.say(self.tokenizer.tokenize(prompt), answer)

    def reply(self, said: str, answer: str) -> None:
        """Makes an answer follow what a user says first."""
        self.answer(f"user: {said}\nassistant: ", answer)

    def client(self, key: str = KEY, **options: Any) -> AsyncOpenAI:  # Any: the client's own
        """Gives the client for loops."""
        options = {"max_retries": 0, "timeout": ANSWER_S} | options
        return AsyncOpenAI(base_url=self.url, api_key=key, **options)

    async def sync[T](self, use: Callable[[OpenAI], T]) -> T:
        """Uses the client that blocks, on a thread."""

        def run() -> T:
            with OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=ANSWER_S) as client:
                return use(client)

        return await to_thread.run_sync(run)


@asynccontextmanager
async def talking(
    num_replicas: int = 0, *, checks_end: bool = True, **options: Any
) -> AsyncGenerator[Talk]:  # Any: those of `site`
    """Runs a server; afterwards nothing runs, no block is lost, and the model is as it was."""
    given: dict[str, Any] = {"config": LONG, "api_key": KEY, "model_name": "fake"} | options  # Any: the same
    async with site(num_replicas, **given) as here:
        here.client.headers["Authorization"] = f"Bearer {KEY}"
        yield Talk(here)
        if checks_end:
            await expect_sound(here)


async def expect_sound(here: Site) -> None:
    """The standing oracle: healthy, a known answer is the same, nothing runs, and no block is lost."""
    assert (await here.client.get("/health")).status_code == 200
    assert await here.complete([7, 8, 9]) == expected_tokens([7, 8, 9], 8)
    await eventually(lambda: not num_busy(here))
    stats = here.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == here.engine.config.num_blocks


def num_busy(here: Site) -> int:
    """Gives what the engine has not given up yet: requests, and blocks."""
    stats = here.engine.stats()
    return stats.running + stats.waiting + stats.used_blocks
