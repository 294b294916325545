"""A model that breaks in the middle: every client is told, the balancer too, and the process says so."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import anyio
import httpx
import pytest

from tests.http.mortal import die
from tests.http.serving import frames_of, strict_json
from tests.http.sites import ANSWER_S, Site, greedy, site

pytestmark = pytest.mark.anyio

ROOT: Final = Path(__file__).parents[2]
NUM_CLIENTS: Final = 8
"""Of each kind."""


async def expect_all_told(here: Site) -> None:
    """Fails unless each stream ends with one error frame, and each other request with 503; then /health."""
    here.runner.before_launch = die
    told: list[httpx.Response] = []

    async def ask(number: int) -> None:
        body = greedy([number], 4000) | {"stream": number < NUM_CLIENTS}
        told.append(await here.client.post("/v1/completions", json=body))

    async with anyio.create_task_group() as tasks:
        for number in range(2 * NUM_CLIENTS):
            tasks.start_soon(ask, number)
    streams = [each for each in told if each.headers["content-type"].startswith("text/event-stream")]
    for response in streams:
        *chunks, last = [strict_json(each) for each in frames_of(response.content)]
        assert last["error"]["type"] == "service_unavailable_error"
        assert all("choices" in chunk for chunk in chunks)
    others = [each for each in told if each not in streams]
    assert {each.status_code for each in others} == {503}
    assert len(streams) == NUM_CLIENTS
    assert not any("fire" in each.text or "0xdead" in each.text for each in told)
    assert (await here.client.get("/health")).status_code == 503
    assert (await here.client.get("/v1/models")).status_code == 200
    assert (await here.client.get("/metrics")).status_code == 200


async def test_every_client_of_a_broken_engine_is_told_in_its_loop() -> None:
    """A stream that just stops looks like an answer that has ended; the device's own words stay inside."""
    async with site(0, step_s=0.001) as here:
        await expect_all_told(here)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_client_of_a_broken_engine_is_told_behind_front_ends() -> None:
    """They outlive it, to say so."""
    async with site(2, step_s=0.001) as here:
        await expect_all_told(here)


async def test_requests_to_a_broken_engine_are_503_on_every_route_that_needs_it() -> None:
    """A balancer tries another one then; with 500 it would not."""
    async with site(0) as here:
        here.runner.before_launch = die
        await here.client.post("/v1/completions", json=greedy([1], 4000))
        user = [{"role": "user", "content": "x"}]
        for path, body in (
            ("/v1/completions", greedy([1], 4)),
            ("/v1/chat/completions", {"messages": user}),
            ("/v1/responses", {"input": "x"}),
        ):
            for is_streamed in (False, True):
                response = await here.client.post(path, json=body | {"stream": is_streamed})
                assert response.status_code == 503, f"{path}: {response.text}"
                assert response.json()["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("num_replicas", [0, 1])
def test_the_command_ends_with_an_exit_code_that_says_so(num_replicas: int) -> None:
    """Whoever supervises the process starts it anew; with 0, or for ever at 503, nobody would."""
    command = [sys.executable, "-m", "tests.http.mortal", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--frontend-replicas", str(num_replicas)],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
    )
    with process:
        assert process.stderr is not None
        said = b""
        while not (found := re.search(rb"http://127.0.0.1:\d+", said)):
            line = process.stderr.readline()
            assert line, said.decode()
            said += line
        url = f"{found[0].decode()}/v1/completions"
        response = httpx.post(url, json=greedy([1], 4000) | {"stream": True}, timeout=ANSWER_S)
        assert b'"error"' in frames_of(response.content)[-1]
        said = process.stderr.read()
    assert process.returncode == 3, said.decode()
    assert b"megallm: the engine failed: RuntimeError: the device at 0xdeadbeef is on fire" in said
