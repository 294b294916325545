"""A server of an engine: in its loop or in processes, it answers, and it ends in every case in its time."""

from typing import override

import anyio
import pytest
from llguidance import LLMatcher

from megallm.core_async.errors import EngineDeadError
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import StepPlan
from tests.byte_tokenizer import ByteTokenizer
from tests.device.profilers import FakeProfiler
from tests.fakes import continuation
from tests.http.loopback import Client, eventually
from tests.http.sites import LONG, Site, site

pytestmark = pytest.mark.anyio

in_processes = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""Starting a process takes a second; the engine's end of it is tested on both loops in test_hub.py."""
END_S = 2.0
"""What a server may take beside the time of its drain."""


async def test_it_serves_in_the_engines_loop() -> None:
    """Tests and notebooks need no process more."""
    async with site(0) as here:
        assert await here.complete([1, 2], 20) == continuation([1, 2], 20)
        assert (await here.client.get("/health")).status_code == 200
        assert here.server.pids == set()
        here.server.begin_stop()
        await here.has_ended.wait()
        assert here.error is None


@in_processes
async def test_it_serves_from_processes() -> None:
    """All of them have the one port, and every answer is the engine's."""
    async with site(2) as here:
        assert len(here.server.pids) == 2
        answers: dict[int, list[int]] = {}

        async def ask(index: int) -> None:
            answers[index] = await here.complete([index], 30)

        async with anyio.create_task_group() as tasks:
            for index in range(16):
                tasks.start_soon(ask, index)
        assert answers == {index: continuation([index], 30) for index in range(16)}
        await eventually(lambda: here.engine.stats().running == 0)


@in_processes
async def test_administrators_reach_the_engine_through_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler is that of the process that runs the model, whichever one has the port."""
    profiler = FakeProfiler.installed(monkeypatch)
    async with site(1, api_key="k") as here:
        here.client.headers["authorization"] = "Bearer k"
        for action in ("start", "stop"):
            response = await here.client.post(f"/v1/{action}_profile")
            assert (response.status_code, response.json()["action"]) == (200, f"{action}_profile")
        assert profiler.told == ["start", "stop"]
        response = await here.client.post("/pause")
        assert response.json()["phase"] == here.engine.phase == "paused"


async def test_a_tokenizer_that_can_not_travel_is_served_in_the_loop_and_a_line_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Slower is better than not at all."""
    async with site(4, tokenizer=ByteTokenizer()) as here:
        assert (await here.client.get("/health")).status_code == 200
        assert here.server.pids == set()
    assert "no front-end processes, since the tokenizer can't go there: it is a ByteTokenizer" in caplog.text


class CountedMatchers(Matchers):
    """An engine's matchers that count what they compile."""

    num_compiled = 0

    @override
    def compile(self, grammar: str) -> LLMatcher:
        CountedMatchers.num_compiled += 1
        return super().compile(grammar)


async def test_a_grammar_is_compiled_by_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes half a second and tens of megabytes; its process need not twice."""
    monkeypatch.setattr(CountedMatchers, "num_compiled", 0)
    async with site(0, make_matchers=CountedMatchers) as here:
        body = {"prompt": [1], "max_tokens": 1, "guided_regex": "a+"}
        for _ in range(2):
            assert (await here.client.post("/v1/completions", json=body)).status_code == 200
    assert CountedMatchers.num_compiled == 1


async def test_two_servers_of_one_engine_stand_side_by_side() -> None:
    """One for the public with a key, one for the inside without."""
    async with site(0) as first, site(0) as second:
        assert first.server.port != second.server.port
        assert await first.complete([1]) == await second.complete([1])


async def expect_dead(here: Site) -> None:
    """Fails unless the engine's death is seen: an error in the stream that runs, 503 afterwards."""
    stream = await here.stream([1], 4000)
    here.runner.before_launch = burn
    await stream.read_until(b'"error"')
    assert (await here.client.get("/health")).status_code == 503
    answer = await here.client.post("/v1/completions", json={"prompt": [1]})
    assert answer.status_code == 503, answer.text


def burn(plan: StepPlan) -> None:
    """Breaks the model."""
    raise RuntimeError("the device is on fire")


async def test_the_engines_failure_is_told_to_clients_in_the_loop() -> None:
    """Whoever balances load sends requests elsewhere then."""
    async with site(0, step_s=0.002) as here:
        await expect_dead(here)


@in_processes
async def test_the_engines_failure_is_told_to_clients_of_processes() -> None:
    """So do front ends that have no request of their own."""
    async with site(2, step_s=0.002) as here:
        await expect_dead(here)


async def test_the_engines_failure_ends_a_server_that_was_to_end_with_it() -> None:
    """`serve` raises then, and the program's exit code says so."""
    async with site(0, ends_with_engine=True, step_s=0.002) as here:
        stream = await here.stream([1], 4000)
        here.runner.before_launch = burn
        assert b'"error"' in await stream.read_to_end()
        await here.has_ended.wait()
        assert isinstance(here.error, EngineDeadError)
        assert "on fire" in str(here.error.__cause__)


async def expect_drained(here: Site) -> None:
    """Fails unless the server ends in its time with clients of every kind, and the blocks are free then."""
    idle = here.connect()
    await idle.get("/health")
    await idle.read_until(b"\r\n\r\n")
    long, _stuck = await here.stream([1], 4000), await here.stream([2], 4000)
    short = await here.stream([3], 4)
    await eventually(lambda: here.engine.stats().running >= 2)
    here.server.begin_stop(0.3)
    with anyio.fail_after(0.3 + END_S):
        assert (await short.read_to_end()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await idle.read_to_end()
        cut = await long.read_to_end()
        assert b'"error"' in cut
        assert b"[DONE]" not in cut
        await here.has_ended.wait()
    await eventually(lambda: here.engine.stats().running == 0)
    assert here.error is None
    with pytest.raises(ConnectionRefusedError):
        Client.connect(here.server.port)


async def test_a_drain_ends_in_its_time_in_the_loop() -> None:
    """An idle connection, a long stream, a client that stopped reading: none of them holds the server."""
    async with site(0, step_s=0.002) as here:
        await expect_drained(here)


@in_processes
async def test_a_drain_ends_in_its_time_in_processes() -> None:
    """So must no process be left."""
    async with site(2, step_s=0.002) as here:
        await expect_drained(here)
        assert here.server.pids == set()


async def test_a_stop_before_the_start_ends_at_once() -> None:
    """Ctrl-C while the front ends' processes start."""
    async with site(0, LONG) as here:
        here.server.begin_stop()
        here.server.begin_stop(0.0)
        await here.has_ended.wait()
