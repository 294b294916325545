"""Both ends of a captured decode step, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.triton_sampling import NUMBERS, TURNS, fetch, look_up, take_best

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
    newest, rows = torch.zeros(9, dtype=torch.int64), torch.tensor([3, 1, 0, 7], dtype=torch.int32)
    turns, told = torch.tensor([2, 2], dtype=torch.int32), torch.full((TURNS, 6), -99, dtype=torch.int32)
    take_best(logits, rows, newest, turns, told)
    best = logits.argmax(-1).tolist()
    assert told[2].tolist() == [best[0], ~best[1], best[2], ~best[3], -99, -99]
    assert told[[0, 1, 3]].unique().tolist() == [-99]
    assert newest[[3, 1, 0, 7]].tolist() == best
    assert turns.tolist() == [3, 2]


def test_every_step_reads_and_writes_the_buffers_of_its_turn() -> None:
    """The host fills one turn's buffer while the device is at another's; after the last comes the first."""
    width = NUMBERS + 5
    sent = torch.arange(TURNS * width, dtype=torch.int32).view(TURNS, width)
    turns, told = torch.zeros(2, dtype=torch.int32), torch.zeros((TURNS, 1), dtype=torch.int32)
    newest, row = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for step in range(TURNS + 2):
        columns = torch.zeros(width - 2, dtype=torch.int32)
        fetch(sent, turns, columns)
        assert columns.tolist() == sent[step % TURNS, : width - 2].tolist()
        logits = torch.zeros(1, 50)
        logits[0, step + 7] = 1
        take_best(logits, row, newest, turns, told)
        assert told[step % TURNS].tolist() == [step + 7]
    assert told[:, 0].tolist() == [11, 12, 9, 10]


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
