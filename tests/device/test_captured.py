"""What a captured step needs on the host."""

import numpy as np
import pytest

from megallm.core_async.device.captured import padded
from megallm.core_async.device.triton_sampling import TURNS
from megallm.core_async.engine import DEPTH


def test_column_is_filled_up_and_never_cut() -> None:
    """A row cut off would keep its last token for ever."""
    column = np.array([3, 1], dtype=np.int32)
    assert padded(column, 4, 9).tolist() == [3, 1, 9, 9]
    with pytest.raises(AssertionError, match="2 entries, room for 1"):
        padded(column, 1, 9)


def test_what_a_step_told_outlives_every_plan_in_flight() -> None:
    """A buffer that is written again before it was read gives wrong tokens, and no error."""
    assert TURNS > DEPTH + 1
