"""Server-sent events."""

import json

import anyio
import pytest

from megallm.core_async.errors import EngineStoppedError
from megallm.http.answers.sse import ChunkFrames, EventStream, error_frame, frame

pytestmark = pytest.mark.anyio


class Frames:
    """A source that gives some frames, then raises, waits for ever, or ends."""

    def __init__(self, *frames: bytes | Exception | None) -> None:
        self._frames = list(frames)

    async def next_frames(self) -> bytes | None:
        if not self._frames:
            await anyio.sleep_forever()
        frames = self._frames.pop(0)
        if isinstance(frames, Exception):
            raise frames
        return frames


def test_an_event_is_one_line_and_an_empty_one() -> None:
    """Line breaks in it are escaped by JSON."""
    assert frame({"a": "b\nc"}) == b'data: {"a":"b\\nc"}\n\n'


def test_a_chunk_is_the_frame_of_its_head_and_one_choice() -> None:
    """A name may have quotes; and all chunks of a stream have the same id."""
    head = {"id": "x", "model": 'a "b"'}
    chunks = ChunkFrames(head)
    for text in ("one", "two\n"):
        assert chunks.chunk({"text": text}) == frame({**head, "choices": [{"text": text}]})


async def test_frames_come_as_the_source_gives_them_and_then_it_is_closed() -> None:
    """Once, however often it is left."""
    closed: list[Exception | None] = []
    stream = EventStream(Frames(b"a", b"b", None), closed.append)
    assert [frames async for frames in stream] == [b"a", b"b"]
    await stream.aclose()
    assert closed == [None]
    assert [frames async for frames in stream] == []


async def test_an_error_is_the_last_frame() -> None:
    """The status was sent long ago; nothing follows, and no `[DONE]`."""
    closed: list[Exception | None] = []
    stream = EventStream(Frames(b"a", EngineStoppedError("down"), b"b"), closed.append)
    first, last = [frames async for frames in stream]
    assert first == b"a"
    assert last == error_frame(EngineStoppedError("down"))
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "down"
    assert [str(error) for error in closed] == ["down"]


async def test_a_cancel_closes_it() -> None:
    """What it reads from is left at once; the framework may not ask again."""
    closed: list[Exception | None] = []
    stream = EventStream(Frames(), closed.append)
    with anyio.move_on_after(0):
        await anext(stream)
    assert closed == [None]


async def test_leaving_early_closes_it() -> None:
    """A generator that is never asked again would keep its requests."""
    closed: list[Exception | None] = []
    stream = EventStream(Frames(b"a", b"b"), closed.append)
    assert await anext(stream) == b"a"
    await stream.aclose()
    assert closed == [None]
