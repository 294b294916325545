"""Clients that leave, over real sockets: also those that have sent something behind their body."""

import pytest

from tests.http.listening import connect, read_until, request_bytes, serving_on_port
from tests.http.serving import Served, eventually

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
NEXT = request_bytes("/health", {}, method="GET")
STRAY = {"nothing": b"", "a line end": b"\r\n", "another request": NEXT, "half of one": NEXT[:9]}


async def expect_given_up(served: Served) -> None:
    """Waits until the engine has dropped what ran, long before its end."""
    await eventually(lambda: served.num_busy == 0)
    assert [reason for reason, *_ in served.counts.of("finished")] == ["abort"]


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY.keys())
@pytest.mark.parametrize("is_one_packet", [True, False], ids=["at once", "later"])
async def test_a_client_that_leaves_is_seen_whatever_it_sent_behind_its_body(
    stray: bytes,
    is_one_packet: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Hypercorn stops reading at such a byte, so the end of the connection behind it was never seen."""
    async with serving_on_port() as (served, port):
        stream = await connect(port)
        await stream.send(request_bytes(URL, LONG) + (stray if is_one_packet else b""))
        await eventually(lambda: served.engine.stats().running == 1)
        if stray and not is_one_packet:
            await stream.send(stray)
        await stream.aclose()
        await expect_given_up(served)


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY.keys())
async def test_a_client_that_leaves_a_stream_is_seen(stray: bytes) -> None:
    """The same where chunks are being written."""
    async with serving_on_port() as (served, port):
        stream = await connect(port)
        await stream.send(request_bytes(URL, {**LONG, "stream": True}) + stray)
        await read_until(stream, b"data: ")
        await stream.aclose()
        await expect_given_up(served)


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    """What is read while a response is made belongs to the next ones."""
    async with serving_on_port() as (served, port):
        short = request_bytes(URL, {**LONG, "max_tokens": 100})
        models = request_bytes("/v1/models", {}, method="GET")
        async with await connect(port) as stream:
            await stream.send(short)
            await eventually(lambda: served.engine.stats().running == 1)
            await stream.send(models + short[:50])
            received = await read_until(stream, b'"object":"list"')
            assert b'"text_completion"' in received
            await stream.send(short[50:] + models)
            received = await read_until(stream, b'"object":"list"')
            assert b'"text_completion"' in received


async def test_a_connection_goes_on_after_its_first_response() -> None:
    """Keep-alive: the same connection serves the next request, and its leaving is seen as well."""
    async with serving_on_port() as (served, port):
        stream = await connect(port)
        for _ in range(2):
            await stream.send(request_bytes(URL, {**LONG, "max_tokens": 2}))
            await read_until(stream, b'"text_completion"')
        served.counts.told.clear()
        await stream.send(request_bytes(URL, LONG) + b"\r\n")
        await eventually(lambda: served.engine.stats().running == 1)
        await stream.aclose()
        await expect_given_up(served)
