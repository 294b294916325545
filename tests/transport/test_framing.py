"""Frames: however a stream is cut, what comes out is what went in, and nonsense is refused with a reason."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.transport.framing import FrameError, FrameReader, FrameWriter


class Text(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A frame of one kind."""

    text: str


class Numbers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A frame of another kind."""

    numbers: list[int]
    column: bytes = b""


type Frame = Text | Numbers

frames = st.one_of(
    st.builds(Text, st.text(max_size=40)),
    st.builds(Numbers, st.lists(st.integers(0, 2**62), max_size=20), st.binary(max_size=300)),
)


def reader(max_bytes: int = 10_000) -> FrameReader[Frame]:
    """Gives a reader of both kinds."""
    return FrameReader[Frame](Text | Numbers, max_bytes)


@given(sent=st.lists(frames, max_size=12), cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    sent: list[Frame], cuts: list[int]
) -> None:
    """A socket gives any part of what was written, from one byte to several frames."""
    writer = FrameWriter()
    for frame in sent:
        writer.add(frame)
    stream = bytes(writer.take())
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    read = reader()
    came = [frame for start, end in pairwise(places) for frame in read.feed(stream[start:end])]
    assert came == sent
    assert len(writer) == 0


def test_a_frame_that_is_too_long_is_refused_by_its_writer_and_spoils_nothing() -> None:
    """A submission too large is its client's fault; the frames of others beside it are sent all the same."""
    writer = FrameWriter(max_bytes=100)
    writer.add(Text("before"))
    with pytest.raises(FrameError, match=r"a Text of 2[0-9][0-9] bytes; a frame has 100 at most"):
        writer.add(Text("x" * 200))
    writer.add(Text("after"))
    assert reader().feed(bytes(writer.take())) == [Text("before"), Text("after")]


def test_a_length_past_the_limit_is_refused_before_its_bytes_come() -> None:
    """Otherwise four bytes could make the engine's process wait for, and hold, four gigabytes."""
    with pytest.raises(FrameError, match=r"4,294,967,295 bytes came; it has 10,000 at most"):
        reader().feed(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("body", [b"\xc1", b"\x92\xa5Other\x01", b"\x92\xa4Text\x01", b""])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    """A front end of another version must not be half understood."""
    with pytest.raises(FrameError, match="no kind that is known here"):
        reader().feed(len(body).to_bytes(4, "little") + body)
