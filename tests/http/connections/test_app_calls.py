"""Calls of the application: what it says arrives, the short way for streams too, and nobody waits for it."""

from typing import Any

import anyio
import h11
import pytest

from megallm.http.connections.app_calls import MAX_MESSAGES, Inbox, Response
from tests.http.loopback import App, Client, connected

pytestmark = pytest.mark.anyio

PIECES = [b"first", b"", b"x" * 70_000, b"\r\n", b"last"]


class Streaming(App):
    """Streams its pieces, with whatever headers and status a test wants."""

    def __init__(self, headers: list[tuple[bytes, bytes]], status: int = 200) -> None:
        super().__init__()
        self.headers = headers
        self.status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # Any: what ASGI says
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for piece in PIECES:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def response_of(client: Client, request: str) -> tuple[h11.Response, bytes, bytes]:
    """Gives what h11, as a client, makes of the answer: its head, its body, and all bytes."""
    parser = h11.Connection(h11.CLIENT)
    line, *_ = request.split(" ")
    parser.send(h11.Request(method=line, target="/", headers=[("host", "x"), ("connection", "close")]))
    parser.send(h11.EndOfMessage())
    await client.send(request)
    raw = await client.read_to_end()
    parser.receive_data(raw)
    parser.receive_data(b"")
    head: h11.Response | None = None
    body = b""
    while not isinstance(event := parser.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
    assert head is not None
    return head, body, raw


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET / HTTP/1.1", [], 200),
        ("GET / HTTP/1.1", [(b"Content-Length", b"70011")], 200),
        ("GET / HTTP/1.0", [], 200),
        ("HEAD / HTTP/1.1", [], 200),
        ("GET / HTTP/1.1", [], 204),
    ],
)
async def test_a_streamed_body_is_framed_as_its_head_says(
    request_line: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """A client that reads by the head would else take frames for text, or wait for more."""
    async with connected(Streaming(headers, status)) as (client, _):
        head, body, raw = await response_of(client, f"{request_line}\nhost: x\nconnection: close\n\n")
    has_body = status != 204 and not request_line.startswith("HEAD")
    assert body == (b"".join(PIECES) if has_body else b"")
    names = dict(head.headers.raw_items())
    is_chunked = b"Transfer-Encoding" in names or b"transfer-encoding" in names
    if has_body:
        assert is_chunked == (request_line.endswith("1.1") and not headers)
        assert (b"\r\n5\r\nfirst\r\n" in raw) == is_chunked


async def test_what_is_no_piece_of_a_body_goes_to_the_protocol() -> None:
    """It alone knows the states of a response."""
    told: list[Any] = []  # Any: ASGI messages
    written: list[bytes] = []

    async def send(message: Any) -> None:  # Any: the same
        told.append(message["type"])

    async def write(piece: bytes) -> None:
        written.append(piece)

    response = Response({"http_version": "1.1", "method": "GET"}, send, write)
    await response.send({"type": "http.response.start", "status": 200, "headers": []})
    await response.send({"type": "http.response.body", "body": b"a", "more_body": True})
    await response.send({"type": "http.response.early_hint"})
    await response.send({"type": "http.response.body", "body": b"b"})
    assert told == ["http.response.start", "http.response.early_hint", "http.response.body"]
    assert written == [b"a"]


async def test_a_body_waits_for_the_application_and_a_disconnect_does_not() -> None:
    """Memory is bounded; that the client has gone must be heard all the same."""
    inbox = Inbox()
    for _ in range(MAX_MESSAGES):
        await inbox.put({"type": "http.request"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inbox.put, {"type": "http.request", "number": 17})
        await anyio.wait_all_tasks_blocked()
        await inbox.put({"type": "http.disconnect"})
        came = [await inbox.receive() for _ in range(MAX_MESSAGES + 1)]
        assert came[-1]["type"] == "http.disconnect"
        assert (await inbox.receive())["number"] == 17


async def test_what_comes_for_an_application_that_has_ended_is_dropped() -> None:
    """The rest of a body that it did not read must not hold the connection."""
    inbox = Inbox()
    for _ in range(MAX_MESSAGES):
        await inbox.put({"type": "http.request"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inbox.put, {"type": "http.request"})
        await anyio.wait_all_tasks_blocked()
        inbox.close()
    await inbox.put({"type": "http.request"})
