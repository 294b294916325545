"""A safetensors file as named tensors, of which one, or some of its rows or columns, are read at a time.

Format: eight bytes with the length of a JSON header, the header, the tensors' bytes. Read here so that
each error names file and key, and so that little but what was asked for is ever in memory. Knows the
format; knows no model.
"""

import math
import os
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from megallm.core_async.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES: Final = 100_000_000
"""What the format allows."""

_CUT_BYTES: Final = 1 << 24
"""Of rows that are in memory at once while columns are cut from them."""

_ITEM_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_READABLE: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
}
"""Formats of floating point, and torch's names of them."""


class StoredTensor(Struct, frozen=True):
    """Where one tensor lies in the file, and as what."""

    shape: tuple[int, ...]
    kind: str
    start: int
    """Byte of the file."""


class _Entry(Struct):
    """A tensor's line in the header, as the file has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """An opened file: its header read, and every tensor checked to lie inside the file.

    Raises: ModelFileError for a file that is absent, truncated or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER_BYTES, max(num_bytes - 8, 0)):  # noqa: PLR2004 - "{}"
                    raise ModelFileError(
                        f"{path} is no safetensors file, or truncated: its header says {length:,} bytes, the "
                        f"file has {num_bytes:,}; fetch it again"
                    )
                header = file.read(length)
        except OSError as error:
            raise ModelFileError(f"{path} can't be read: {error}; fetch it again") from error
        self.tensors: Final = self._placed(header, 8 + length, num_bytes)

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> "torch.Tensor":
        """Gives a tensor, or some of its rows or columns, in memory of their own, on the CPU.

        Columns lie apart in the file: rows are read a few at a time, and cut.

        Raises: UnsupportedModelError when it is stored in a format of quantised models.
        """
        import torch

        self.check_readable(name)
        entry = self.tensors[name]
        wanted = range(entry.shape[0]) if rows is None else rows
        if columns is None:
            return self._rows(entry, wanted)
        kept = torch.empty((len(wanted), len(columns)), dtype=getattr(torch, _READABLE[entry.kind]))
        num_rows = max(1, _CUT_BYTES // (entry.shape[1] * _ITEM_BYTES[entry.kind]))
        for first in range(0, len(wanted), num_rows):
            some = self._rows(entry, wanted[first : first + num_rows])
            kept[first : first + len(some)] = some[:, columns.start : columns.stop]
        return kept

    def _rows(self, entry: StoredTensor, rows: range) -> "torch.Tensor":
        import torch

        row_bytes = math.prod(entry.shape[1:]) * _ITEM_BYTES[entry.kind]
        tensor = torch.empty((len(rows), *entry.shape[1:]), dtype=getattr(torch, _READABLE[entry.kind]))
        with self.path.open("rb", buffering=0) as file:
            file.seek(entry.start + rows.start * row_bytes)
            _fill(memoryview(tensor.view(-1).view(torch.uint8).numpy()), file, self.path)
        return tensor

    def check_readable(self, name: str) -> None:
        """Refuses a tensor that `read` would refuse, without reading it.

        Raises: UnsupportedModelError when it is stored in a format of quantised models.
        """
        kind = self.tensors[name].kind
        if kind not in _READABLE:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {kind}, supported are {', '.join(_READABLE)}; use "
                "the model's unquantised folder"
            )

    def _placed(self, header: bytes, base: int, num_bytes: int) -> dict[str, StoredTensor]:
        try:
            raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(line, type=_Entry) for name, line in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{self.path}: the header can't be read: {error}; fetch the file again"
            ) from error
        placed: dict[str, StoredTensor] = {}
        for name, entry in entries.items():
            first, end = entry.data_offsets
            wanted = math.prod(entry.shape) * _ITEM_BYTES.get(entry.dtype, 0)
            if entry.dtype not in _ITEM_BYTES or first < 0 or end - first != wanted:
                raise ModelFileError(
                    f"{self.path}: tensor {name} is {entry.dtype} of shape {entry.shape} in {end - first:,} "
                    "bytes, which don't fit together; the file is damaged"
                )
            if base + end > num_bytes:
                raise ModelFileError(
                    f"{self.path} is truncated: it has {num_bytes:,} bytes, tensor {name} ends at "
                    f"{base + end:,}; fetch the file again"
                )
            placed[name] = StoredTensor(entry.shape, entry.dtype, base + first)
        return placed


def _fill(target: memoryview, file: RawIOBase, path: Path) -> None:
    """Reads until `target` is full: one read gives 2 GB at most."""
    while target:
        num_read = file.readinto(target)
        if not num_read:
            raise ModelFileError(f"{path} ended while it was read; fetch it again")
        target = target[num_read:]
