"""Ids, and the columns of numbers that stand for lists of Structs on the step path."""

from array import array
from collections.abc import Sequence
from typing import NewType

RequestId = NewType("RequestId", int)
Row = NewType("Row", int)
"""A place in the batch: index into the per-request state that every rank keeps, 0 .. max_requests - 1."""
BlockId = NewType("BlockId", int)

Ints = NewType("Ints", bytes)
"""A column of int32, machine byte order (little-endian on every supported machine)."""
Floats = NewType("Floats", bytes)
"""A column of float32, machine byte order."""


def pack_ints(values: Sequence[int] | array[int]) -> Ints:
    """Gives the column of int32 that holds `values`."""
    return Ints(array("i", values).tobytes())


def unpack_ints(column: Ints) -> array[int]:
    """Gives the numbers of a column; iterates as Python ints."""
    values = array("i")
    values.frombytes(column)
    return values


def pack_floats(values: list[float]) -> Floats:
    """Gives the column of float32 that holds `values`."""
    return Floats(array("f", values).tobytes())


def unpack_floats(column: Floats) -> array[float]:
    """Gives the numbers of a column; iterates as Python floats."""
    values = array("f")
    values.frombytes(column)
    return values
