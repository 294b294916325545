"""The page at `/` in a real browser, against a real server of the fake model.

The test says when the model makes its next token, so it sees the page at each stage.
Runs with `-m browser`; on Debian `apt-get install chromium chromium-driver` gives what it needs.
"""

import json
import socket
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import anyio
import pytest
import sniffio
from anyio import to_thread

from megallm.core_async.messages import StepPlan
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.app import create_app
from megallm.http.connections.app_server import AppServer, protocol_config
from megallm.http.metrics import Metrics
from megallm.http.service import AppSettings
from megallm.http.traffic import Traffic
from tests.engines import Rig, engine_config, running
from tests.fakes import FakeTokenizer, continuation
from tests.http.browser import ENTER, ESCAPE, TAB, Browser, running_browser

pytestmark = [pytest.mark.browser, pytest.mark.anyio]

ANSWER = "document.querySelector('article.assistant:last-of-type .text')?.textContent"
FIGURES = "document.querySelector('article.assistant:last-of-type .figures')?.textContent"
IS_BUSY = "!document.getElementById('stop').disabled"


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """Gives one browser to all tests; each opens the page anew."""
    with running_browser() as each:
        yield each


class Pace:
    """How many steps the model may make; none at first."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._is_free = False

    def allow(self, num_steps: int) -> None:
        """Lets it make so many more."""
        self._steps.release(num_steps)

    def free(self) -> None:
        """Lets it go on as it likes."""
        self._is_free = True
        self._steps.release()

    def __call__(self, plan: StepPlan) -> None:
        """Waits, on the rank's thread, until the step is allowed."""
        if not self._is_free:
            assert self._steps.acquire(timeout=30.0), f"nobody allows step {plan.step}"


@asynccontextmanager
async def served(api_key: str | None = None) -> AsyncGenerator[tuple[str, Rig, Pace]]:
    """Runs engine and server round a block; gives the page's address."""
    config = engine_config(num_blocks=512, max_sequence_length=1024, max_tokens=1024)
    pace, traffic = Pace(), Traffic()
    async with running(config, is_threaded=True) as rig:
        rig.runner.before_launch = pace
        app = create_app(
            rig.engine,
            TokenizerAdapter(FakeTokenizer()),
            AppSettings(model_name="small", api_key=api_key),
            backend="trio" if sniffio.current_async_library() == "trio" else "asyncio",
            metrics=Metrics(rig.engine.stats, "small"),
            traffic=traffic,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = AppServer(app, listener, protocol_config(32 << 10), traffic)
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.run)
            try:
                yield f"http://127.0.0.1:{port}/", rig, pace
            finally:
                pace.free()
            server.begin_drain(0.0)


async def until_idle(rig: Rig) -> None:
    """Waits until no request runs and all blocks are free."""
    with anyio.fail_after(10.0):
        while rig.engine.stats().running or rig.engine.stats().used_blocks:
            await anyio.lowlevel.checkpoint()


def answer_to(conversation: str, num_tokens: int) -> str:
    """Gives what the fake model says: without a template the contents are joined with newlines."""
    tokens = continuation(FakeTokenizer().tokenize(conversation), num_tokens, (FakeTokenizer.eod,))
    return FakeTokenizer().detokenize(tokens)


def shows(text: str) -> str:
    """Gives the condition that the page shows this as the last answer."""
    return f"{ANSWER} === {json.dumps(text)}"


async def test_tokens_appear_one_by_one_and_escape_stops_them(browser: Browser) -> None:
    """This is the page's purpose: to see the model write, and to stop it without leaving work behind."""
    async with served() as (url, rig, pace):

        def use() -> None:
            browser.open(url)
            browser.wait("document.title === 'megallm · small'")
            browser.press("hello")  # the message has the focus from the start
            browser.press(ENTER)
            browser.wait(IS_BUSY)
            pace.allow(1)
            browser.wait(shows(answer_to("hello", 1)))
            pace.allow(5)
            browser.wait(shows(answer_to("hello", 6)))
            assert browser.value("document.querySelector('article.assistant').ariaBusy") == "true"
            browser.wait("document.getElementById('running').textContent === '1'")
            browser.press(ESCAPE)
            browser.wait(f"!({IS_BUSY})")
            assert "stopped" in browser.value(FIGURES)

        await to_thread.run_sync(use)
        pace.free()
        await until_idle(rig)
        assert rig.engine.stats().step < 20, "the engine went on without a reader"
        assert await to_thread.run_sync(browser.complaints) == []


async def test_a_conversation_goes_on_after_a_stop(browser: Browser) -> None:
    """What the model had said by then is part of the conversation."""
    async with served() as (url, rig, pace):
        partial = answer_to("hi", 4)

        def use() -> None:
            browser.open(url)
            browser.press("hi", "#message")
            browser.click("#send")
            pace.allow(4)
            browser.wait(shows(partial))
            browser.click("#stop")
            browser.wait(f"!({IS_BUSY})")
            pace.free()
            browser.click("summary")
            browser.press("12", "#max_tokens")
            browser.press("be brief", "#system")
            browser.press("go on", "#message")
            browser.press(ENTER, "#message")
            browser.wait(f"!({IS_BUSY}) && document.querySelectorAll('article').length === 4")
            conversation = f"be brief\nhi\n{partial}\ngo on"
            assert browser.value(ANSWER) == answer_to(conversation, 12)
            assert browser.value(FIGURES).startswith("12 tokens · ")
            assert browser.value(FIGURES).endswith(" · length")
            browser.click("#clear")
            assert browser.value("document.querySelectorAll('article').length") == 0

        await to_thread.run_sync(use)
        await until_idle(rig)
        assert await to_thread.run_sync(browser.complaints) == []


async def test_mistakes_are_told_and_keep_what_was_written(browser: Browser) -> None:
    """A message must not be lost for a wrong option, or for a server that refuses it."""
    async with served() as (url, _, pace):
        pace.free()

        def use() -> None:
            browser.open(url)
            browser.click("summary")
            browser.press("7", "#temperature")
            browser.press("hello", "#message")
            browser.press(ENTER, "#message")
            browser.wait("document.getElementById('error').textContent.startsWith('Temperature: ')")
            browser.value("document.getElementById('temperature').value = ''")
            browser.press("5000", "#max_tokens")
            browser.press(ENTER, "#message")
            browser.wait("document.getElementById('error').textContent.includes('maximum context length')")
            assert browser.value("document.getElementById('message').value") == "hello"
            assert browser.value("document.querySelectorAll('article.assistant').length") == 0

        await to_thread.run_sync(use)
        complaints = await to_thread.run_sync(browser.complaints)
        assert [complaint for complaint in complaints if "400" not in complaint] == []


async def test_the_page_asks_its_own_server_alone_and_follows_the_system(browser: Browser) -> None:
    """It works without the internet, with the keyboard, and at night."""
    async with served() as (url, _, pace):
        pace.free()

        def use() -> None:
            browser.open(url)
            browser.wait("document.getElementById('running').textContent === '0'")
            asked = browser.value("performance.getEntriesByType('resource').map((each) => each.name)")
            assert {name.removeprefix(url) for name in asked} == {"v1/models", "metrics"}
            reached = list[str]()
            for _ in range(3):
                browser.press(TAB)
                reached.append(browser.value("document.activeElement.id || document.activeElement.tagName"))
            assert reached == ["send", "clear", "SUMMARY"]  # nothing is there to be stopped
            back = "getComputedStyle(document.body).backgroundColor"
            browser.prefer("light")
            light = browser.value(back)
            browser.prefer("dark")
            assert light != browser.value(back)

        await to_thread.run_sync(use)
        assert await to_thread.run_sync(browser.complaints) == []
