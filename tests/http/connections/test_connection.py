"""One connection: requests in, responses out, and whoever leaves is noticed, on both loops."""

import logging
from collections.abc import Iterator

import anyio
import pytest

from megallm.http.connections.app_calls import MAX_MESSAGES
from megallm.http.connections.connection import MAX_PENDING
from tests.http.loopback import App, connected

pytestmark = pytest.mark.anyio

BIG = bytes(range(256)) * 8192
"""More than is read ahead, and more than a socket takes at once."""


@pytest.fixture(autouse=True)
def _keep_quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield


async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    """Clients keep connections, since a new one costs a round trip."""
    async with connected(App()) as (client, _):
        for path in ("/first", "/second"):
            await client.get(path)
            assert b"200" in await client.read_until(f"GET {path}".encode())


async def test_a_request_may_come_byte_by_byte() -> None:
    """A network cuts as it likes."""
    async with connected(App()) as (client, _):
        for byte in b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: 5\r\n\r\nhello":
            await client.send(bytes([byte]))
        await client.read_until(b"\r\n\r\nhello")


async def test_a_request_sent_before_the_response_waits_its_turn() -> None:
    """HTTP/1.1 allows it, and the second answer must not overtake the first."""
    app = App()
    async with connected(app) as (client, _):
        await client.get("/hold")
        await client.get("/next")
        await app.entered.wait()
        assert app.num_calls == 1
        app.go.set()
        assert b"/next" not in await client.read_until(b"held")
        await client.read_until(b"GET /next")


async def test_a_large_body_goes_in_and_out_whole() -> None:
    """A batch of prompts is megabytes, and so is its answer."""
    async with connected(App()) as (client, _):

        async def send() -> None:
            await client.send(
                b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(BIG) + BIG
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await client.read_until(b"\r\n\r\n")
            assert await client.read_until(BIG[-256:] * 8192) == BIG


@pytest.mark.parametrize("stray", ["", "\n\n", "GET /next HTTP/1.1\nhost: test\n\n", "GET /ne"])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent(stray: str) -> None:
    """Its request is aborted then, and its blocks are free for others. Hypercorn alone looks away."""
    app = App()
    async with connected(app) as (client, _):
        await client.send("POST /hold HTTP/1.1\nhost: test\ncontent-length: 2\n\nhi" + stray)
        await app.entered.wait()
        client.close()
        await app.left.wait()


async def test_a_client_that_ends_its_side_has_left() -> None:
    """It can't be told from one that is gone, and no client that waits for an answer does it."""
    app = App()
    async with connected(app) as (client, _):
        await client.get("/hold")
        await app.entered.wait()
        client.end()
        await app.left.wait()


async def test_an_idle_connection_ends_after_its_time() -> None:
    """Clients that forget their connections would else use up the files that a process may open."""
    async with connected(App(), keep_alive_timeout=0.05) as (client, _):
        await client.get("/")
        assert b"GET /" in await client.read_to_end()


async def test_a_request_that_never_gets_whole_does_not_keep_its_connection() -> None:
    """A client that sends a header a minute would hold it for ever."""
    async with connected(App(), keep_alive_timeout=0.05) as (client, _):
        await client.send("GET / HTTP/1.1\nhost: te")
        assert await client.read_to_end() == b""


async def test_a_connection_with_a_request_under_way_is_not_idle() -> None:
    """A long generation may take longer than a connection may be idle."""
    app = App()
    async with connected(app, keep_alive_timeout=0.5) as (client, _):
        await client.get("/hold")
        await app.entered.wait()
        with anyio.move_on_after(0.7):
            await app.left.wait()
        app.go.set()
        await client.read_until(b"held")


async def test_headers_past_the_bound_are_refused() -> None:
    """Anybody may send headers, also without an API key."""
    app = App()
    async with connected(app) as (client, _):
        await client.send("GET / HTTP/1.1\nhost: test\nx: " + "y" * 20_000)
        assert b" 431 " in await client.read_to_end()
    assert app.num_calls == 0


async def test_what_is_no_http_is_refused() -> None:
    """A port is scanned by all kinds of programs."""
    async with connected(App()) as (client, _):
        await client.send(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert b" 400 " in await client.read_to_end()


async def test_an_application_that_fails_is_a_500_and_the_connection_goes_on() -> None:
    """One bad request must not cost its neighbours on a proxy's connection."""
    async with connected(App()) as (client, _):
        await client.get("/fail")
        assert b" 500 " in await client.read_until(b"\r\n\r\n")


async def test_an_application_that_fails_halfway_ends_the_connection() -> None:
    """The client must see that the response is not whole."""
    async with connected(App()) as (client, _):
        await client.get("/fail-late")
        came = await client.read_to_end()
        assert b"part" in came
        assert not came.endswith(b"0\r\n\r\n")


async def test_a_body_that_the_application_leaves_unread_does_not_hold_the_connection() -> None:
    """A route that refuses by the headers alone never reads the body."""
    async with connected(App()) as (client, _):
        length = MAX_PENDING + MAX_MESSAGES * 2**16 + 2**20
        await client.send(f"POST /deaf HTTP/1.1\nhost: test\ncontent-length: {length}\n\n")
        await client.read_until(b"POST /deaf")
        assert await client.read_to_end() == b""


async def test_a_client_that_stops_reading_holds_back_the_application_alone() -> None:
    """What it does not read is left in the application, not in this process's memory."""
    app = App()
    async with connected(app) as (client, connection):
        await client.get("/flood")
        await app.entered.wait()
        await anyio.wait_all_tasks_blocked()
        assert not app.left.is_set()
        connection.abort()
        await app.left.wait()


async def test_draining_ends_an_idle_connection_and_lets_a_response_finish() -> None:
    """Who has nothing under way loses nothing; who has, gets it."""
    app = App()
    async with connected(app) as (busy, connection):
        await busy.get("/hold")
        await app.entered.wait()
        connection.drain()
        app.go.set()
        await busy.read_until(b"held")
    async with connected(App()) as (idle, connection):
        await idle.get("/")
        await idle.read_until(b"GET /")
        await anyio.wait_all_tasks_blocked()
        connection.drain()
        assert await idle.read_to_end() == b""
