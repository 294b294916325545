"""The sockets between ranks: only ranks of this job get in, and what goes wrong names the other rank."""

import logging
import socket
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import structs

from megallm.core_async.errors import RankLostError
from megallm.core_async.transport import ranks
from megallm.core_async.transport.frames import Fault
from megallm.core_async.transport.rank_frames import (
    FROM_FOLLOWER,
    FROM_LEADER,
    AskWhere,
    CallEnded,
    CallMade,
    End,
    FromFollower,
    FromLeader,
    Here,
    Join,
    Started,
)
from megallm.core_async.transport.ranks import (
    Meeting,
    MeetingPlace,
    RankStream,
    connect,
    encoded,
)
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]

NAMES = (4, 5)


def joined() -> tuple[RankStream[FromFollower], RankStream[FromLeader]]:
    """Gives both ends of a connection: the leader's, then the follower's."""
    left, right = socket.socketpair()
    leaders = RankStream[FromFollower](left, 5, FROM_FOLLOWER)
    return leaders, RankStream[FromLeader](right, 4, FROM_LEADER)


async def test_a_rank_that_knows_the_secret_gets_in_with_all_it_says() -> None:
    """Frames that come right behind the first one are not lost."""
    place = MeetingPlace(None)
    assert place.meeting.host == "127.0.0.1"
    follower = await connect(place.meeting, 1, 4, FROM_LEADER)
    follower.put(Started())
    (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    assert await leaders.receive() == [Started()]
    leaders.put(AskWhere())
    assert await follower.receive() == [AskWhere()]
    leaders.close()
    follower.close()


@pytest.mark.parametrize(
    "first",
    [
        encoded(Join(1, b"guessed")),
        encoded(Started()),
        b"\xff\xff\xff\x7f",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
async def test_a_stranger_is_turned_away_and_ranks_get_in(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Every process of the machine can reach loopback."""
    place = MeetingPlace(None)
    address = place.meeting.host, place.meeting.port
    with caplog.at_level(logging.WARNING), socket.create_connection(address) as stranger:
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        follower = await connect(place.meeting, 1, 4, FROM_LEADER)
        (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    assert "is none of this engine's ranks" in caplog.text
    leaders.close()
    follower.close()


async def test_a_silent_stranger_keeps_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever reaches the port could hold up the start; nor do more of them than are looked at."""
    monkeypatch.setattr(ranks, "MAX_STRANGERS", 2)
    place = MeetingPlace(None)
    address = place.meeting.host, place.meeting.port
    with socket.create_connection(address), anyio.fail_after(ranks.JOIN_S / 2):
        follower = await connect(place.meeting, 1, 4, FROM_LEADER)
        (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    leaders.close()
    follower.close()


async def test_a_place_that_is_taken_or_unknown_is_turned_away() -> None:
    """A rank that comes twice would get another one's plans."""
    place = MeetingPlace(None)
    strangers = [await connect(place.meeting, wrong, 4, FROM_LEADER) for wrong in (0, 2, -1)]
    follower = await connect(place.meeting, 1, 4, FROM_LEADER)
    (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    for stream in [*strangers, leaders, follower]:
        stream.close()


async def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs are where to look."""
    monkeypatch.setattr(ranks, "CONNECT_S", 0.0)
    place = MeetingPlace(None)
    with pytest.raises(RankLostError, match=r"ranks \[5, 6\] did not connect within 0 s"):
        await place.others((4, 5, 6), FROM_FOLLOWER)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
async def test_ranks_are_told_the_host_as_it_was_given(host: str) -> None:
    """What a name is on the leader's machine may be another thing on theirs."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    place = MeetingPlace(host)
    assert place.meeting.host == host
    follower = await connect(place.meeting, 1, 4, FROM_LEADER)
    (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    leaders.close()
    follower.close()


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader listens on one of them, and need not have the same order."""
    place = MeetingPlace(None)
    known = socket.getaddrinfo

    def look_up(_host: str, *arguments: Any, **options: Any) -> list[Any]:  # Any: the real one's
        return [found for each in ("127.0.0.2", "127.0.0.1") for found in known(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    follower = await connect(structs.replace(place.meeting, host="node0"), 1, 4, FROM_LEADER)
    (leaders,) = await place.others(NAMES, FROM_FOLLOWER)
    leaders.close()
    follower.close()


async def test_a_host_that_is_not_known_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the leader's program was given, and this machine may know it by another name."""

    def look_up(*_arguments: object, **_options: object) -> list[Any]:  # Any: the real one's
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(
        RankLostError, match="rank 4 is not reached at node0 port 5000: Name or service not known"
    ):
        await connect(Meeting("node0", 5000, bytes(32)), 1, 4, FROM_LEADER)


async def test_a_leader_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets to it may be dropped on the way."""
    monkeypatch.setattr(ranks, "CONNECT_S", 0.0)
    place = MeetingPlace(None)
    with pytest.raises(RankLostError, match=r"rank 4 is not reached at 127\.0\.0\.1 port \d+: \w+ timed out"):
        await connect(place.meeting, 1, 4, FROM_LEADER)
    place.close()


async def test_a_leader_that_is_not_there_is_named() -> None:
    """With where it was looked for."""
    place = MeetingPlace(None)
    place.close()
    with pytest.raises(
        RankLostError, match=r"rank 4 is not reached at 127.0.0.1 port \d+: Connection refused"
    ):
        await connect(place.meeting, 1, 4, FROM_LEADER)


async def test_an_end_and_nonsense_are_a_lost_rank() -> None:
    """Nothing that comes after it can be understood."""
    leaders, followers = joined()
    followers.close()
    with pytest.raises(RankLostError, match="rank 5 is lost: its connection"):
        await leaders.receive()
    leaders.close()
    left, right = socket.socketpair()
    leaders = RankStream[FromFollower](left, 5, FROM_FOLLOWER)
    with right:
        right.sendall(b"\x01\x00\x00\x00x")
        with pytest.raises(RankLostError, match="rank 5 is lost: it sent what makes no sense"):
            await leaders.receive()
    leaders.close()


async def test_what_the_socket_does_not_take_is_written_in_order() -> None:
    """A rank that is busy for a while must not stall the leader's loop, nor lose its place."""
    leaders, followers = joined()
    frames = [CallMade(number, "x" * 20_000) for number in range(50)]
    received: list[FromFollower] = []
    async with anyio.create_task_group() as tasks:
        await tasks.start(followers.flush)
        for frame in frames:
            followers.put(frame)
        followers.put(Here(3))
        assert followers.num_frames == 51
        assert followers.num_bytes > 1_000_000
        while len(received) < 51:
            received += await leaders.receive()
        tasks.cancel_scope.cancel()
    assert received == [*frames, Here(3)]
    leaders.close()
    followers.close()


async def test_a_rank_that_reads_nothing_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's memory has an end."""
    monkeypatch.setattr(ranks, "MAX_BEHIND", 1_000_000)
    leaders, followers = joined()
    leaders.put_bytes(bytes(5_000_000))
    leaders.put(AskWhere())
    with pytest.raises(RankLostError, match=r"rank 5 is lost: it is \d,\d+,\d+ bytes behind, at most 1,0"):
        await leaders.receive()
    leaders.close()
    followers.close()


async def test_what_was_left_is_written_before_the_end() -> None:
    """A rank that is told why all ends, behind megabytes of other things, is told."""
    leaders, followers = joined()
    received: list[FromLeader] = []

    async def read() -> None:
        while len(received) < 41:
            received.extend(await followers.receive())
        followers.close()

    for number in range(40):
        leaders.put(CallEnded(number, Fault("ValueError", "x" * 50_000)))
    leaders.put(End(Fault("RankLostError", "rank 3 is lost")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await leaders.drain(5)
    assert received[-1] == End(Fault("RankLostError", "rank 3 is lost"))
    leaders.close()
    await leaders.drain(5)  # a closed one has nothing to wait for


async def test_a_drain_waits_until_the_other_side_has_closed() -> None:
    """That is how a leader knows that a rank has given its model back."""
    leaders, followers = joined()
    closed: list[str] = []

    async def close() -> None:
        with pytest.raises(RankLostError):
            await followers.receive()
        closed.append("follower")
        followers.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await leaders.drain(10.0)
        assert closed == ["follower"]
    leaders.close()


def test_the_meeting_travels_as_msgpack(anyio_backend: object) -> None:
    """In a record of a fixed size."""
    meeting = Meeting("127.0.0.1", 5000, bytes(32))
    encoded_meeting = msgspec.msgpack.encode(meeting)
    assert len(encoded_meeting) < 100
    assert msgspec.msgpack.decode(encoded_meeting, type=Meeting) == meeting
