"""Columns: what is packed comes back, as Python numbers."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import pack_floats, pack_ints, unpack_floats, unpack_ints

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_a_column_of_ints_gives_back_what_was_packed(values: list[int]) -> None:
    """Every number of a plan and of a result travels in one."""
    column = pack_ints(values)
    assert len(column) == 4 * len(values)
    assert unpack_ints(column).tolist() == values
    assert pack_ints(array("i", values)) == column


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_a_column_of_floats_gives_back_what_was_packed(values: list[float]) -> None:
    """A log-prob of minus infinity is a log-prob too."""
    assert unpack_floats(pack_floats(values)).tolist() == values
