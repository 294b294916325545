"""From a plan to tensors: ids, positions, slots and block tables of one step, without a loop over rows.

Knows the plan, the rows and the block size; knows no model. On a CPU the tensors are the numpy columns
themselves; on another device all columns travel in one copy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.attention import AttentionBatch
from megallm.core_async.device.kv_cache import num_blocks_for, slots_for
from megallm.core_async.device.rope import RopeTable
from megallm.core_async.device.rows import IntColumn, Rows, SamplingColumns, column_of, ramps
from megallm.core_async.messages import StepPlan


class StepInputs(Struct, frozen=True, eq=False):
    """What one forward pass and the sampling after it need."""

    token_ids: Tensor
    """`[tokens]`, int64."""
    batch: AttentionBatch
    logit_tokens: Tensor | None
    """Indices of the tokens that need logits, in batch order; None is all of them."""
    num_samples: int
    sampled_rows: Tensor
    """`[samples]`, int64: which row each sampled token belongs to."""
    host_sampled_rows: IntColumn
    sampling: SamplingColumns
    sampled_positions: IntColumn
    """`[samples]`: the position in its sequence that each sampled token takes."""
    num_top: int
    """How many of the likeliest tokens any of the step's rows asks for."""
    scored_tokens: Tensor | None
    """Indices of the tokens whose successors' log-probs are wanted; None is none."""
    targets: Tensor | None
    """`[scored tokens]`, int64: those successors."""


def inputs_of(
    plan: StepPlan, rows: Rows, *, block_size: int, device: torch.device, rope: RopeTable | None
) -> StepInputs:
    """Builds the step's tensors; the plan's differences were applied to `rows` before."""
    plan_rows, starts, lengths = column_of(plan.rows), column_of(plan.starts), column_of(plan.lengths)
    query_starts = np.zeros(len(plan_rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    ends = starts + lengths
    if num_tokens == len(plan_rows):
        positions, row_of_token = starts, plan_rows
    else:
        positions = np.repeat(starts, lengths) + ramps(lengths)
        row_of_token = np.repeat(plan_rows, lengths)
    slots = slots_for(rows.block_tables, row_of_token, positions, block_size)
    max_kv_length = int(ends.max())
    block_tables = rows.block_tables[plan_rows, : num_blocks_for(max_kv_length, block_size)]
    samples = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.uint8)).astype(np.int32)
    sampled_rows = plan_rows[samples]
    scored, targets = _scored(plan, lengths)
    columns = (
        column_of(plan.tokens),
        plan_rows,
        positions,
        slots,
        query_starts,
        ends,
        query_starts[1:][samples] - 1,
        sampled_rows,
        scored,
        targets,
        block_tables,
    )
    tokens_t, rows_t, positions_t, slots_t, query_starts_t, ends_t, *chosen_t, tables_t = _on_device(
        columns, device
    )
    logits_t, sampled_t, scored_t, targets_t = chosen_t
    batch = AttentionBatch(
        num_tokens=num_tokens,
        num_decode=plan.num_decode,
        max_query_length=int(lengths.max()),
        max_kv_length=max_kv_length,
        positions=positions_t,
        slots=slots_t.long(),
        query_starts=query_starts_t,
        kv_lengths=ends_t,
        block_tables=tables_t,
        host_starts=starts,
        host_query_starts=query_starts,
        host_kv_lengths=ends,
        host_block_tables=block_tables,
        cosines=None if rope is None else rope.cosines.index_select(0, positions_t),
        sines=None if rope is None else rope.sines.index_select(0, positions_t),
        is_rope_interleaved=rope is not None and rope.is_interleaved,
    )
    return StepInputs(
        token_ids=_token_ids(rows.last_tokens, rows_t[: plan.num_decode], tokens_t),
        batch=batch,
        logit_tokens=None if len(samples) == num_tokens else logits_t,
        num_samples=len(samples),
        sampled_rows=sampled_t.long(),
        host_sampled_rows=sampled_rows,
        sampling=rows.sampling_of(sampled_rows),
        sampled_positions=ends[samples],
        num_top=rows.num_top_of(plan_rows),
        scored_tokens=scored_t if len(scored) else None,
        targets=targets_t.long() if len(scored) else None,
    )


def _scored(plan: StepPlan, lengths: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Gives the tokens that have a target, and the targets."""
    targets = column_of(plan.targets)
    if not len(targets):
        return targets, targets
    has_targets = np.repeat(np.frombuffer(plan.scored, dtype=np.bool_), lengths)
    is_wanted = targets != -1
    return np.flatnonzero(has_targets)[is_wanted].astype(np.int32), targets[is_wanted]


def _token_ids(last_tokens: Tensor, decode_rows: Tensor, tokens: Tensor) -> Tensor:
    """Gives the decode rows' last tokens, which never left the device, then the plan's tokens."""
    if not len(tokens):
        return last_tokens.index_select(0, decode_rows)
    if not len(decode_rows):
        return tokens.long()
    return torch.cat((last_tokens.index_select(0, decode_rows), tokens.long()))


def _on_device(columns: Sequence[IntColumn], device: torch.device) -> list[Tensor]:
    """Gives each column as an int32 tensor on `device`."""
    if device.type == "cpu":
        return [torch.from_numpy(column if column.flags.writeable else column.copy()) for column in columns]
    packed = torch.from_numpy(np.concatenate([column.ravel() for column in columns])).pin_memory()
    parts = packed.to(device, non_blocking=True).split([column.size for column in columns])
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
