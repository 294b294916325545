"""The frames of a generation's choices as they come; completions and chat each say how a chunk is written."""

from typing import Protocol

from megallm.core_async.messages import Delta
from megallm.http.answers.generation import Generation
from megallm.http.answers.sse import DONE


class ChunkWriter(Protocol):
    """Writes the chunks of one response."""

    def chunks(self, index: int, delta: Delta) -> bytes:
        """Gives the frames of one choice's news, perhaps none; with its last, the frame that ends it."""
        ...

    def usage_chunk(self) -> bytes:
        """Gives the frame of the token counts."""
        ...


class ChoiceStream:
    """A source of frames: whatever waits is given at once, and after the last choice `[DONE]`."""

    def __init__(self, generation: Generation, writer: ChunkWriter, *, with_usage: bool) -> None:
        self._generation = generation
        self._writer = writer
        self._with_usage = with_usage
        self._is_over = False

    async def next_frames(self) -> bytes | None:
        """Waits until a frame is to be sent; None after the last.

        Raises: as `Generation.next_deltas`.
        """
        frames: list[bytes] = []
        while not self._is_over and not any(frames):
            frames = [self._writer.chunks(*news) for news in await self._generation.next_deltas()]
            self._is_over = self._generation.has_ended
        if not frames:
            return None
        if self._is_over:
            frames += [self._writer.usage_chunk() if self._with_usage else b"", DONE]
        return b"".join(frames)
