"""A plan's tensors, against a loop over its rows."""

import numpy as np
import pytest
import torch
from msgspec import structs

from megallm.core_async.device.rope import table_of
from megallm.core_async.device.rows import Rows
from megallm.core_async.device.step_inputs import StepInputs, inputs_of
from megallm.core_async.messages import StepPlan, pack_ints
from tests.counted_lines import lines_run

CPU = torch.device("cpu")


def rows_with_tables(max_requests: int = 6) -> Rows:
    """Gives rows whose tables hold distinct blocks, and whose last tokens are 100, 101, .."""
    rows = Rows(max_requests=max_requests, max_sequence_length=40, block_size=4, device=CPU)
    rows.block_tables[:] = (
        np.random.default_rng(0).permutation(rows.block_tables.size).reshape(rows.block_tables.shape)
    )
    rows.last_tokens[:max_requests] = torch.arange(max_requests) + 100
    return rows


def plan_of(parts: list[tuple[int, int, int, bool]], *, num_decode: int, tokens: list[int]) -> StepPlan:
    """Gives the plan of (row, start, length, samples) parts."""
    return structs.replace(
        StepPlan.empty(),
        num_decode=num_decode,
        rows=pack_ints([row for row, _, _, _ in parts]),
        starts=pack_ints([start for _, start, _, _ in parts]),
        lengths=pack_ints([length for _, _, length, _ in parts]),
        samples=bytes(samples for _, _, _, samples in parts),
        tokens=pack_ints(tokens),
    )


def built(plan: StepPlan, rows: Rows) -> StepInputs:
    """Gives the plan's tensors, without rotary positions."""
    return inputs_of(plan, rows, block_size=4, device=CPU, rope=None)


def test_mixed_step_has_every_tokens_position_and_slot() -> None:
    """One token in the wrong slot is another request's text."""
    rows = rows_with_tables()
    parts = [(3, 17, 1, True), (0, 5, 1, True), (5, 2, 4, False), (1, 0, 7, True)]
    inputs = built(plan_of(parts, num_decode=2, tokens=list(range(11))), rows)
    positions = [start + offset for _, start, length, _ in parts for offset in range(length)]
    owners = [row for row, _, length, _ in parts for _ in range(length)]
    slots = [
        int(rows.block_tables[row, at // 4]) * 4 + at % 4 for row, at in zip(owners, positions, strict=True)
    ]
    batch = inputs.batch
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert inputs.token_ids.tolist() == [103, 100, *range(11)]
    assert batch.query_starts.tolist() == [0, 1, 2, 6, 13]
    assert batch.kv_lengths.tolist() == [18, 6, 6, 7]
    assert batch.block_tables.tolist() == rows.block_tables[[3, 0, 5, 1], :5].tolist()
    assert (batch.num_tokens, batch.num_decode, batch.max_query_length, batch.max_kv_length) == (13, 2, 7, 18)
    assert inputs.logit_tokens is not None
    assert inputs.logit_tokens.tolist() == [0, 1, 12]
    assert inputs.sampled_rows.tolist() == [3, 0, 1]
    assert inputs.sampled_positions.tolist() == [18, 6, 7]


def test_decode_step_takes_its_ids_from_the_device_and_projects_every_token() -> None:
    """The usual step: no id comes from the host, and no row is picked out for the output layer."""
    inputs = built(plan_of([(2, 9, 1, True), (4, 0, 1, True)], num_decode=2, tokens=[]), rows_with_tables())
    assert inputs.token_ids.tolist() == [102, 104]
    assert inputs.logit_tokens is None
    assert inputs.num_samples == 2
    assert inputs.batch.positions.tolist() == [9, 0]


def test_chunk_of_one_token_is_no_decode_row() -> None:
    """The last token of a prompt may come alone, and its id is the plan's."""
    inputs = built(plan_of([(2, 9, 1, True)], num_decode=0, tokens=[77]), rows_with_tables())
    assert inputs.token_ids.tolist() == [77]
    assert inputs.batch.num_decode == 0


def test_scored_tokens_are_those_with_a_target() -> None:
    """A prompt's chunk is scored beside rows that are not, and -1 is no token."""
    parts = [(3, 17, 1, True), (5, 2, 4, False), (1, 0, 2, True), (2, 0, 3, True)]
    plan = structs.replace(
        plan_of(parts, num_decode=1, tokens=list(range(9))),
        scored=bytes([0, 1, 0, 1]),
        targets=pack_ints([7, 8, -1, 9, 4, 5, -1]),
    )
    inputs = built(plan, rows_with_tables())
    assert inputs.scored_tokens is not None
    assert inputs.targets is not None
    assert inputs.scored_tokens.tolist() == [1, 2, 4, 7, 8]
    assert inputs.targets.tolist() == [7, 8, 9, 4, 5]
    unscored = built(plan_of(parts, num_decode=1, tokens=list(range(9))), rows_with_tables())
    assert unscored.scored_tokens is unscored.targets is None


def test_rotary_rows_are_gathered_by_position() -> None:
    """Once a step, for all layers."""
    angles = torch.arange(40.0)[:, None] * torch.tensor([0.1, 0.2])
    rope = table_of(angles, factor=1.0, is_interleaved=False, dtype=torch.float32)
    plan = plan_of([(1, 6, 1, True), (2, 3, 2, True)], num_decode=1, tokens=[5, 6])
    batch = inputs_of(plan, rows_with_tables(), block_size=4, device=CPU, rope=rope).batch
    assert batch.cosines is not None
    assert batch.cosines.equal(angles[[6, 3, 4]].cos())


@pytest.mark.parametrize("length", [1, 8])
def test_more_rows_run_no_more_python(length: int) -> None:
    """A loop over rows would cost a batch of 256 more than the model's own launch."""

    def lines_of(count: int) -> int:
        rows = Rows(max_requests=count, max_sequence_length=64, block_size=4, device=CPU)
        parts = [(row, 32, length, row % 2 == 0) for row in range(count)]
        plan = plan_of(parts, num_decode=0, tokens=[1] * count * length)
        return lines_run(lambda: built(plan, rows))

    assert lines_of(256) == lines_of(4) > 0
