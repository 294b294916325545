"""A GGUF file as metadata and tensors; knows the format, no model and no torch.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. The header is
read here rather than by the `gguf` package's reader, which makes five numpy arrays of every string
of a vocabulary: 3 s where this takes 0.1. Block formats are dequantised by that package.
"""

import math
import mmap
import struct
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megallm.core_async.errors import ModelFileError, UnsupportedModelError

type Value = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_ROW_ITEMS: Final = 1 << 14
"""Of the rows that tensors are dequantised in: with those of a small model the package's loop is slower."""
_SCALARS: Final = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


class TensorEntry(Struct, frozen=True):
    """Where one tensor lies in the file, and as what."""

    shape: tuple[int, ...]
    """Outermost dimension first."""
    kind: gguf.GGMLQuantizationType
    start: int
    """Byte of the file."""
    num_bytes: int


class GgufFile:
    """An opened GGUF file: its header read and checked, its tensors mapped but not read.

    Raises: ModelFileError for a file that is absent, truncated or not GGUF; UnsupportedModelError for a
    tensor's format that the `gguf` package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise ModelFileError(f"{path} can't be read: {error}; give the path of a GGUF file") from error
        header = _Header(path, self._bytes)
        self.metadata: Final = header.metadata
        self.tensors: Final = header.tensors

    def read(
        self, name: str, *, rows: range | None = None, columns: range | None = None
    ) -> NDArray[np.float32]:
        """Gives a tensor, or some of its rows or columns, dequantised, in memory of its own.

        Of the rest, no more is dequantised than the blocks that the first and the last column share.

        Raises: UnsupportedModelError when its format is one that can't be dequantised.
        """
        self.check_readable(name)
        entry = self.tensors[name]
        block_items, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
        row_bytes = entry.shape[-1] // block_items * block_bytes
        stored = np.frombuffer(self._bytes, np.uint8, entry.num_bytes, entry.start)
        stored = stored.reshape(*entry.shape[:-1], row_bytes)
        if rows is not None and entry.shape[1:]:
            stored = stored[rows.start : rows.stop]
        cut = columns if entry.shape[1:] else rows
        if cut is None:
            values = _dequantised(stored, entry.kind)
        else:
            first, last = cut.start // block_items, -(-cut.stop // block_items)
            blocks = np.ascontiguousarray(stored[..., first * block_bytes : last * block_bytes])
            start = cut.start - first * block_items
            values = _dequantised(blocks, entry.kind)[..., start : start + len(cut)]
        return np.array(values, np.float32, copy=None if values.flags.writeable else True, order="C")

    def check_readable(self, name: str) -> None:
        """Refuses a tensor that `read` would refuse, without reading it.

        Raises: UnsupportedModelError when its format is one that can't be dequantised.
        """
        kind = self.tensors[name].kind
        if not _can_dequantise(kind):
            readable = ", ".join(each.name for each in gguf.GGMLQuantizationType if _can_dequantise(each))
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {kind.name}, which can't be dequantised; use a "
                f"file with tensors of {readable}"
            )

    def value[T: Value](self, key: str, kind: type[T]) -> T:
        """Gives a metadata value that must be there.

        Raises: ModelFileError when it is absent or of another type than `kind`.
        """
        if key not in self.metadata:
            raise ModelFileError(
                f"{self.path} has no metadata {key}; the file is incomplete, convert it again"
            )
        found = self.metadata[key]
        if type(found) is not kind:
            raise ModelFileError(
                f"{self.path}: metadata {key} is {type(found).__name__} {str(found)[:40]}, "
                f"{kind.__name__} is needed; convert the file again"
            )
        return found

    def value_or[T: Value](self, key: str, default: T) -> T:
        """Gives a metadata value, or `default` when there is none; the type must be the default's."""
        return self.value(key, type(default)) if key in self.metadata else default

    def list_of[T: (str, int)](self, key: str, kind: type[T]) -> list[T]:
        """Gives a metadata array that must be there, empty or of `kind` throughout."""
        found = self.value(key, list)
        items = [item for item in found if type(item) is kind]
        if len(items) != len(found):
            raise ModelFileError(
                f"{self.path}: metadata {key} is no array of {kind.__name__}; convert the file again"
            )
        return items


def _dequantised(stored: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    """Gives the values of rows of blocks, dequantised in rows of another length, of which there are fewer."""
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = stored.size // block_bytes
    row_blocks = max(n for n in range(1, _ROW_ITEMS // block_items + 1) if num_blocks % n == 0)
    values = gguf.quants.dequantize(stored.reshape(-1, row_blocks * block_bytes), kind)
    return values.reshape(*stored.shape[:-1], -1)


@cache
def _can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    """Says whether the `gguf` package dequantises a format, which it tells by doing it alone."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros(block_bytes, np.uint8), kind)
    except NotImplementedError:  # the package's word for a format that it only names
        return False
    return True


class _Header:
    """The header's reader: a position in the bytes that only moves forward, and never past the end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._position = 0
        self._reading = "the header"
        self._check_version()
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._string()
            self._reading = f"metadata {key}"
            self.metadata[key] = self._value(self._scalar("I"))
        self._reading = "the list of tensors"
        entries = [self._entry() for _ in range(num_tensors)]
        self.tensors = self._placed(entries)

    def _check_version(self) -> None:
        magic = self._take(len(_MAGIC))
        if magic != _MAGIC:
            raise ModelFileError(
                f"{self._path} starts with {magic!r}, a GGUF file with {_MAGIC!r}; give a GGUF file"
            )
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelFileError(
                f"{self._path} is GGUF version {version} (little-endian), supported are {_VERSIONS}; "
                "convert the model with a current llama.cpp"
            )

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._content):
            raise ModelFileError(
                f"{self._path} is truncated: it has {len(self._content):,} bytes, {self._reading} needs "
                f"{end:,}; fetch the file again"
            )
        taken = self._content[self._position : end]
        self._position = end
        return taken

    def _scalar(self, code: str) -> int:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        encoded = self._take(self._scalar("Q"))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._path}: {self._reading} is no UTF-8; the file is damaged") from error

    def _value(self, kind: int) -> Value:
        if kind == gguf.GGUFValueType.STRING:
            return self._string()
        if kind == gguf.GGUFValueType.ARRAY:
            item_kind, length = self._scalar("I"), self._scalar("Q")
            if item_kind == gguf.GGUFValueType.STRING:
                return [self._string() for _ in range(length)]
            code = self._code(item_kind)
            return list(struct.unpack(f"<{length}{code}", self._take(length * struct.calcsize("<" + code))))
        return self._scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        for scalar, code in _SCALARS.items():
            if kind == scalar:
                return code
        raise ModelFileError(
            f"{self._path}: {self._reading} has the unknown type {kind}; the file is damaged"
        )

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads one tensor's line: name, shape, format and offset from the start of the tensors."""
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _placed(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, TensorEntry]:
        """Turns offsets into places in the file, each checked to lie in it."""
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(
                f"{self._path}: metadata general.alignment is {alignment}; the file is damaged"
            )
        base = -(-self._position // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        for name, shape, kind_id, offset in entries:
            try:
                kind = gguf.GGMLQuantizationType(kind_id)
            except ValueError as error:
                raise UnsupportedModelError(
                    f"{self._path}: tensor {name} is stored in format {kind_id}, which gguf "
                    f"{version('gguf')} does not know; install a newer gguf package, or fetch the file again "
                    "if it is damaged"
                ) from error
            block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if not shape or math.prod(shape) == 0 or shape[-1] % block_items:
                raise ModelFileError(
                    f"{self._path}: tensor {name} has shape {shape}, {kind.name} needs rows of a multiple of "
                    f"{block_items}; the file is damaged"
                )
            entry = TensorEntry(shape, kind, base + offset, math.prod(shape) // block_items * block_bytes)
            if entry.start + entry.num_bytes > len(self._content):
                raise ModelFileError(
                    f"{self._path} is truncated: it has {len(self._content):,} bytes, tensor {name} ends at "
                    f"{entry.start + entry.num_bytes:,}; fetch the file again"
                )
            placed[name] = entry
        return placed
