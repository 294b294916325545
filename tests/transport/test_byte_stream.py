"""The byte stream: what is written arrives, whole and in order, and nobody waits for a peer that is gone."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from megallm.core_async.transport.byte_stream import ByteStream

pytestmark = pytest.mark.anyio

MUCH = bytes(range(256)) * 20_000
"""More than a socket holds."""


@asynccontextmanager
async def two_ends() -> AsyncGenerator[tuple[ByteStream, ByteStream]]:
    """Gives both ends of a stream, and closes them."""
    first, second = map(ByteStream, socket.socketpair())
    try:
        yield first, second
    finally:
        first.close()
        second.close()


async def read_to_end(stream: ByteStream) -> bytes:
    """Gives all that comes until the end."""
    read = bytearray()
    while chunk := await stream.receive():
        read += chunk
    return bytes(read)


async def test_all_that_is_written_arrives_in_order() -> None:
    """Frames and responses are cut anywhere by the socket; a byte lost or swapped ends a front end."""
    async with two_ends() as (writer, reader):
        read = bytearray()

        async def write() -> None:
            await writer.send(b"begin")
            await writer.send(MUCH)
            await writer.send(b"end")
            writer.end()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            read += await read_to_end(reader)
        assert bytes(read) == b"begin" + MUCH + b"end"


async def test_a_write_that_the_socket_takes_needs_no_turn_of_the_loop() -> None:
    """A stream of tokens is one small write after the other: a turn for each would be most of its cost."""
    async with two_ends() as (writer, reader):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await writer.send(b"now")
        assert not scope.cancelled_caught
        assert await reader.receive() == b"now"


async def test_a_reader_gets_at_most_what_it_asked_for() -> None:
    """The bound on a request's headers holds only while no read goes far past it."""
    async with two_ends() as (writer, reader):
        await writer.send(b"12345678")
        assert [await reader.receive(5), await reader.receive(5)] == [b"12345", b"678"]


async def test_a_cancelled_read_loses_nothing() -> None:
    """A reader may be cancelled by a time limit and go on."""
    async with two_ends() as (writer, reader):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await reader.receive()
        await writer.send(b"kept")
        assert await reader.receive() == b"kept"


async def test_aborting_ends_a_write_that_waits_for_a_peer_that_does_not_read() -> None:
    """Otherwise one client that stopped reading would hold the server's end for ever."""
    async with two_ends() as (writer, _):
        failures: list[OSError] = []

        async def write() -> None:
            try:
                await writer.send(MUCH)
            except OSError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.wait_all_tasks_blocked()
            writer.abort()
        assert len(failures) == 1
        writer.abort()  # again, of a stream that has ended


async def test_closing_lets_a_waiting_reader_go() -> None:
    """A task that waits for a socket that is closed would else wait for the next one of that number."""
    async with two_ends() as (stream, _):

        async def read() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await stream.receive()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            stream.close()
            stream.close()


async def test_a_peer_that_went_is_an_end_to_the_reader_and_an_error_to_the_writer() -> None:
    """This is how either process learns that the other was killed."""
    async with two_ends() as (here, there):
        there.close()
        assert await here.receive() == b""
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            await here.send(b"too late")
