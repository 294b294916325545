"""The sockets between one rank and those that it leads or gives work: who connects, and frames each way.

The one listens on loopback unless a host is named; where, and the secret that a rank proves itself
with, travels over torch.distributed, to ranks of this job alone. Knows frames; knows no step and no model.
"""

import errno
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from megallm.core_async.errors import RankLostError
from megallm.core_async.kit.foreign import on_own_thread
from megallm.core_async.transport.addresses import LOOPBACK, listening, resolved
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.framing import (
    LENGTH_BYTES,
    FrameError,
    FrameReader,
    FrameWriter,
    Kinds,
)
from megallm.core_async.transport.rank_frames import Join

log = logging.getLogger(__name__)

CONNECT_S: Final = 15.0
"""How long the leader waits for the others: each has its address already, and does nothing else meanwhile.

A rank that dies before it connects is noticed by nothing else.
"""

JOIN_S: Final = 5.0
"""How long a connection has to say who it is."""

MAX_JOIN_BYTES: Final = 256
MAX_STRANGERS: Final = 128
"""Connections at once that have not said who they are; more are closed."""

MAX_BEHIND: Final = 64 * 2**20
"""Bytes that a rank may be behind: it does not read any more."""


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """Where the leader listens, and the secret it expects."""

    host: str
    port: int
    secret: bytes


class RankStream[T]:
    """Owns the socket to another rank, and what was not written yet. One task reads."""

    def __init__(self, sock: socket.socket, name: int, kinds: Kinds[T]) -> None:
        """`name`: the other's global rank, for errors."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._stream = ByteStream(sock)
        self._reader = FrameReader[T](kinds.union)
        self._rest = bytearray()
        self._has_rest = anyio.Event()
        self._why_lost: str | None = None
        self.num_frames = 0
        """Frames written so far, and their bytes."""
        self.num_bytes = 0

    async def receive(self) -> list[T]:
        """Waits for frames. A cancel loses nothing.

        Raises: RankLostError when the other has gone, is far behind, or speaks nonsense.
        """
        try:
            while chunk := await self._stream.receive():
                if frames := self._reader.feed(chunk):
                    return frames
        except OSError as error:
            raise self._lost(f"its connection failed: {error}") from error
        except anyio.ClosedResourceError as error:
            raise self._lost("its connection was closed") from error
        except FrameError as error:
            raise self._lost(f"it sent what makes no sense: {error}") from error
        raise self._lost("its connection has ended")

    def put(self, frame: msgspec.Struct) -> None:
        """Writes a frame, or keeps what the socket does not take for `flush`.

        One that is far behind is given up: whoever reads from it says so.
        """
        self.put_bytes(encoded(frame))

    def put_bytes(self, frame: bytes | bytearray) -> None:
        """The same for an encoded one."""
        self.num_frames += 1
        self.num_bytes += len(frame)
        if self._why_lost is not None:
            return
        if not self._rest:
            try:
                frame = frame[self._stream.send_now(frame) :]
            except OSError:
                return  # who reads from it says so
        if frame:
            self._rest += frame
            self._has_rest.set()
        if len(self._rest) > MAX_BEHIND:
            self._why_lost = f"it is {len(self._rest):,} bytes behind, at most {MAX_BEHIND:,}"
            self._rest.clear()
            self._stream.abort()

    async def flush(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Writes what the socket did not take at once, until cancelled or the other has gone."""
        task_status.started()
        try:
            while True:
                await self._has_rest.wait()
                self._has_rest = anyio.Event()
                await self._write_rest()
        except (OSError, anyio.ClosedResourceError):
            return  # who reads from it says so

    async def drain(self, deadline_s: float) -> None:
        """Writes the rest and ends, and reads until the other has closed too; for `deadline_s` at most."""
        with anyio.move_on_after(deadline_s, shield=True):
            try:
                await self._write_rest()
                self._stream.end()
                while await self._stream.receive():
                    pass
            except (OSError, anyio.ClosedResourceError):
                return

    async def _write_rest(self) -> None:
        """Writes what is left. A cancel leaves what was not written."""
        while self._rest:
            with memoryview(self._rest) as rest:
                sent = self._stream.send_now(rest)
            del self._rest[:sent]
            if self._rest:
                await self._stream.writable()

    def close(self) -> None:
        """Closes the socket; idempotent."""
        self._stream.close()

    def _lost(self, why: str) -> RankLostError:
        return RankLostError(f"rank {self.name} is lost: {self._why_lost or why}")


def encoded(frame: msgspec.Struct) -> bytearray:
    """Gives a frame's bytes, the length first. Raises: FrameError when it is too long."""
    writer = FrameWriter()
    writer.add(frame)
    return writer.take()


class _Joined[T]:
    """Who has come: owner of their streams until all have."""

    def __init__(self, names: Sequence[int], kinds: Kinds[T]) -> None:
        self._names = names
        self._kinds = kinds
        self.streams: dict[int, RankStream[T]] = {}
        self.num_strangers = 0
        """Connections that have not said who they are."""
        self.all_here = anyio.Event()

    @property
    def missing(self) -> list[int]:
        """The global ranks that have not come."""
        return [name for place, name in enumerate(self._names) if place and place not in self.streams]

    def add(self, place: int | None, sock: socket.socket) -> bool:
        """Takes a rank's socket; False where it is none of ours, or has come before."""
        if place is None or not 0 < place < len(self._names) or place in self.streams:
            log.warning("a connection came that is none of this engine's ranks; it was closed")
            return False
        self.streams[place] = RankStream(sock, self._names[place], self._kinds)
        if not self.missing:
            self.all_here.set()
        return True

    def close(self) -> None:
        """Closes whoever has come."""
        for stream in self.streams.values():
            stream.close()


class MeetingPlace:
    """Owns the leader's listening socket, until all have come."""

    def __init__(self, host: str | None, port: int | None = None) -> None:
        """Listens; see `listening`. The others are told the host as it is given here: each resolves it."""
        self._listener = listening(host, port)
        bound_port: int = self._listener.getsockname()[1]
        self.meeting = Meeting(host or LOOPBACK, bound_port, secrets.token_bytes(32))

    async def others[T](self, names: Sequence[int], kinds: Kinds[T]) -> list[RankStream[T]]:
        """Waits for every rank but the first, and gives them in order. Closes the listening socket.

        `names`: the global ranks by place; `kinds`: of frames that they send.
        Raises: RankLostError naming who did not come.
        """
        joined = _Joined(names, kinds)
        try:
            with anyio.move_on_after(CONNECT_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._accept, tasks, joined)
                    await joined.all_here.wait()
                    tasks.cancel_scope.cancel()
        except BaseException:
            joined.close()
            raise
        finally:
            self.close()
        if joined.missing:
            joined.close()
            raise RankLostError(f"ranks {joined.missing} did not connect within {CONNECT_S:g} s")
        return [stream for _, stream in sorted(joined.streams.items())]

    async def _accept[T](self, tasks: TaskGroup, joined: "_Joined[T]") -> None:
        """Takes connections, and lets each say who it is: a silent one keeps no rank waiting."""
        while True:
            await anyio.wait_readable(self._listener)
            sock, _ = self._listener.accept()
            if joined.num_strangers >= MAX_STRANGERS:
                sock.close()
                continue
            joined.num_strangers += 1
            tasks.start_soon(self._admit, sock, joined)

    async def _admit[T](self, sock: socket.socket, joined: "_Joined[T]") -> None:
        """Takes a connection in, if it is one of ours that has not come yet."""
        stream = ByteStream(sock)
        place = None
        try:
            with anyio.move_on_after(JOIN_S):
                place = await self._place_of(stream)
        finally:
            joined.num_strangers -= 1
            if not joined.add(place, sock):
                stream.close()

    async def _place_of(self, stream: ByteStream) -> int | None:
        """Gives the place that a connection proves to have. Reads its first frame, and no byte after it."""
        reader = FrameReader[Join](Join, MAX_JOIN_BYTES)
        try:
            length = await _exactly(stream, LENGTH_BYTES)
            reader.feed(length)
            (join,) = reader.feed(await _exactly(stream, int.from_bytes(length, "little")))
        except (OSError, FrameError):
            return None
        return join.place if hmac.compare_digest(join.secret, self.meeting.secret) else None

    def close(self) -> None:
        """Listens no more; idempotent."""
        self._listener.close()


async def connect[T](meeting: Meeting, place: int, leader: int, kinds: Kinds[T]) -> RankStream[T]:
    """Connects a rank to the one that listens, whose global rank is `leader`; `kinds`: that one sends.

    Raises: RankLostError when that can't be reached.
    """
    try:
        with anyio.fail_after(CONNECT_S):
            sock = await _reached(meeting)
    except OSError as error:
        why = error.strerror or os.strerror(errno.ETIMEDOUT)
        where = f"{meeting.host} port {meeting.port}"
        raise RankLostError(f"rank {leader} is not reached at {where}: {why}") from error
    stream = RankStream(sock, leader, kinds)
    stream.put(Join(place, meeting.secret))
    return stream


async def _reached(meeting: Meeting) -> socket.socket:
    """Gives a connected socket. Raises: OSError."""
    refusal = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    for family, _, _, _, address in await on_own_thread(partial(resolved, meeting.host, meeting.port)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        error = errno.EINPROGRESS
        try:
            sock.setblocking(False)
            error = sock.connect_ex(address)
            if error == errno.EINPROGRESS:
                await anyio.wait_writable(sock)
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        finally:
            if error:
                sock.close()
        if not error:
            return sock
        refusal = OSError(error, os.strerror(error))  # a name may have more addresses than are listened on
    raise refusal


async def _exactly(stream: ByteStream, num_bytes: int) -> bytes:
    """Gives so many bytes. Raises: OSError when the stream ends before."""
    chunk = b""
    while len(chunk) < num_bytes:
        more = await stream.receive(num_bytes - len(chunk))
        if not more:
            raise ConnectionError("the stream has ended")
        chunk += more
    return chunk
