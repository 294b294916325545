"""A fault that public trackers are full of: the request goes on after its client has left."""

from typing import Any

import anyio
import pytest

from tests.http.asgi_call import AsgiCall
from tests.http.serving import ANSWER_S, Served, eventually, serving, serving_config

pytestmark = pytest.mark.anyio

C, H = "/v1/completions", "/v1/chat/completions"
NUM_CLIENTS = 20
LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}
MAX_STEPS = 8
"""What may still be in flight, or planned, when the last client has left."""


def body_of(url: str, number: int) -> dict[str, Any]:  # Any: JSON
    """Gives a request for a long answer."""
    said = f"client {number}"
    return LONG | ({"prompt": said} if url == C else {"messages": [{"role": "user", "content": said}]})


async def expect_all_given_up(served: Served, calls: list[AsgiCall]) -> None:
    """Leaves all calls and fails unless their requests are gone after a few steps, and counted as aborted."""
    step = served.engine.stats().step
    for call in calls:
        call.leave()
    for call in calls:
        await call.ended()
    await eventually(lambda: served.num_busy == 0)
    assert served.engine.stats().step - step <= MAX_STEPS
    reasons = [reason for reason, *_ in served.counts.of("finished")]
    assert reasons == ["abort"] * NUM_CLIENTS
    assert served.traffic.num_open == 0


@pytest.mark.parametrize("url", [C, H])
async def test_streams_whose_clients_leave_are_given_up(url: str) -> None:
    """Seen as 1,803 tokens made for nobody, and as a cache that fills up with them."""
    config = serving_config(num_blocks=2048, max_requests=32, max_sequence_length=4096)
    async with serving(config) as served:
        calls = [AsgiCall(served, url, {**body_of(url, at), "stream": True}) for at in range(NUM_CLIENTS)]
        for call in calls:
            await call.until_chunks(3)
        await expect_all_given_up(served, calls)


@pytest.mark.parametrize("url", [C, H])
async def test_requests_whose_clients_leave_are_given_up_without_streaming_too(url: str) -> None:
    """Nothing is written there until the end, so no failing write tells."""
    config = serving_config(num_blocks=2048, max_requests=32, max_sequence_length=4096)
    async with serving(config) as served:
        calls = [AsgiCall(served, url, body_of(url, at)) for at in range(NUM_CLIENTS)]
        await eventually(lambda: served.engine.stats().running == NUM_CLIENTS)
        await expect_all_given_up(served, calls)


async def test_one_that_waits_in_line_is_given_up() -> None:
    """Its place in the waiting list goes to another."""
    config = serving_config(max_requests=1, max_sequence_length=512)
    async with serving(config) as served:
        first = AsgiCall(served, C, {**body_of(C, 1), "max_tokens": 400, "stream": True})
        await first.until_chunks(2)
        second = AsgiCall(served, C, {**body_of(C, 2), "max_tokens": 400})
        await eventually(lambda: served.engine.stats().waiting == 1)
        second.leave()
        await second.ended()
        await eventually(lambda: served.engine.stats().waiting == 0)
        first.leave()
        await first.ended()


async def test_all_choices_of_a_request_are_given_up() -> None:
    """`n` choices of several prompts are one connection."""
    async with serving(serving_config(num_blocks=512, max_sequence_length=512)) as served:
        body = {"prompt": ["one", "other"], "n": 3, "max_tokens": 400, "ignore_eos": True, "stream": True}
        call = AsgiCall(served, C, body)
        await call.until_chunks(2)
        call.leave()
        await call.ended()
        with anyio.fail_after(ANSWER_S):
            await eventually(lambda: served.num_busy == 0)
        assert len(served.counts.of("finished")) == 6
