"""Frames on a stream: a length, then that many bytes of msgpack. Never pickle.

Knows bytes alone; which frames there are stands in `frames.py`.
"""

from struct import Struct
from typing import Any, Final

import msgspec

from megallm.core_async.errors import MegaLLMError

MAX_FRAME_BYTES: Final = 256 * 2**20
"""Of one frame: a submission of 64 million prompt tokens."""

_LENGTH: Final = Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size


class FrameError(MegaLLMError):
    """A frame is too long, or is not what the reader takes. The peer's fault, or that of its version."""


class FrameWriter:
    """Gathers frames until they are taken, all at once."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._gathered = bytearray()

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, frame: msgspec.Struct) -> None:
        """Adds a frame.

        Raises: FrameError when it is too long; nothing is added then.
        """
        start = len(self._gathered)
        body = start + _LENGTH.size
        self._gathered += bytes(_LENGTH.size)
        self._encoder.encode_into(frame, self._gathered, -1)
        length = len(self._gathered) - body
        if length > self._max_bytes:
            del self._gathered[start:]
            raise FrameError(
                f"a {type(frame).__name__} of {length:,} bytes; a frame has {self._max_bytes:,} at most"
            )
        _LENGTH.pack_into(self._gathered, start, length)

    def take(self) -> bytearray:
        """Gives everything that was added since the last call; the caller owns it."""
        gathered, self._gathered = self._gathered, bytearray()
        return gathered


class Kinds[T]:
    """The frames that may come from one side: T is their union."""

    def __init__(self, union: Any) -> None:  # Any: a union of Structs, which is no class
        self.union = union


class FrameReader[T]:
    """Makes frames of the bytes of a stream, however they were cut."""

    def __init__(self, kinds: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:  # Any: a union of Structs
        self._max_bytes = max_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[T]:
        """Gives the frames that `chunk` completes.

        Raises: FrameError when one is too long or none of the kinds; the stream is of no use then.
        """
        self._rest += chunk
        frames: list[T] = []
        start = 0
        with memoryview(self._rest) as rest:
            while len(rest) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(rest, start)
                if length > self._max_bytes:
                    raise FrameError(f"a frame of {length:,} bytes came; it has {self._max_bytes:,} at most")
                body = start + _LENGTH.size
                if len(rest) < body + length:
                    break
                frames.append(self._decode(rest[body : body + length]))
                start = body + length
        del self._rest[:start]
        return frames

    def _decode(self, body: memoryview) -> T:
        try:
            with body:
                return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise FrameError(f"a frame of no kind that is known here came: {error}") from error
