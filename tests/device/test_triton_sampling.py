"""Both ends of a captured decode step, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.triton_sampling import look_up, take_best

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_best_is_the_first_of_equals_and_nan_is_not_finite() -> None:
    """What the sampler gives on a CPU, over more logits than one program looks at."""
    logits = torch.randn(4, 9000)
    logits[1, 8000] = torch.nan
    logits[2, 5] = logits[2, 4500] = 99
    logits[3] = -torch.inf
    newest = torch.zeros(9, dtype=torch.int64)
    tokens, is_finite = take_best(logits, torch.tensor([3, 1, 0, 7], dtype=torch.int32), newest)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert is_finite.tolist() == [True, False, True, False]
    assert newest[[3, 1, 0, 7]].tolist() == tokens.tolist()


def test_tokens_are_those_given_or_the_rows_newest() -> None:
    """Slots come through the row's own block table."""
    tables = torch.arange(27, dtype=torch.int32).view(9, 3)
    rows, positions = torch.tensor([3, 1, 8]).int(), torch.tensor([0, 5, 9]).int()
    newest = torch.arange(9) * 10
    decodes = look_up(rows, positions, newest, tables, block_size=4)
    assert decodes.token_ids.tolist() == [30, 10, 80]
    assert decodes.slots.tolist() == [9 * 4, 4 * 4 + 1, 26 * 4 + 1]
    assert decodes.kv_lengths.tolist() == [1, 6, 10]
    known = torch.tensor([-1, 0, 77]).int()
    assert look_up(rows, positions, newest, tables, block_size=4, known=known).token_ids.tolist() == [
        30,
        0,
        77,
    ]
