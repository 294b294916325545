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


class _HostColumns(Struct, frozen=True, eq=False):
    """One step's rows and tokens in the plan's own terms, on the host."""

    rows: IntColumn
    starts: IntColumn
    ends: IntColumn
    lengths: IntColumn
    query_starts: IntColumn
    positions: IntColumn
    slots: IntColumn
    block_tables: IntColumn
    samples: IntColumn
    """Which of the rows sample."""


def inputs_of(
    plan: StepPlan, rows: Rows, *, block_size: int, device: torch.device, rope: RopeTable | None
) -> StepInputs:
    """Builds the step's tensors; the plan's differences were applied to `rows` before."""
    host = _host_columns(plan, rows, block_size)
    samples = host.samples
    sampled_rows = host.rows[samples]
    scored, targets = _scored(plan, host.lengths)
    columns = {
        "tokens": column_of(plan.tokens),
        "rows": host.rows,
        "positions": host.positions,
        "slots": host.slots,
        "query_starts": host.query_starts,
        "ends": host.ends,
        "block_tables": host.block_tables,
        "logit_tokens": host.query_starts[1:][samples] - 1,
        "sampled_rows": sampled_rows,
        "scored": scored,
        "targets": targets,
    }
    tensors = dict(zip(columns, _on_device(list(columns.values()), device), strict=True))
    batch = _batch(plan, host, tensors, rope)
    return StepInputs(
        token_ids=_token_ids(rows.last_tokens, tensors["rows"][: plan.num_decode], tensors["tokens"]),
        batch=batch,
        logit_tokens=None if len(samples) == batch.num_tokens else tensors["logit_tokens"],
        num_samples=len(samples),
        sampled_rows=tensors["sampled_rows"].long(),
        host_sampled_rows=sampled_rows,
        sampling=rows.sampling_of(sampled_rows),
        sampled_positions=host.ends[samples],
        num_top=rows.num_top_of(host.rows),
        scored_tokens=tensors["scored"] if len(scored) else None,
        targets=tensors["targets"].long() if len(scored) else None,
    )


def _host_columns(plan: StepPlan, rows: Rows, block_size: int) -> _HostColumns:
    plan_rows, starts, lengths = column_of(plan.rows), column_of(plan.starts), column_of(plan.lengths)
    query_starts = np.zeros(len(plan_rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    ends = starts + lengths
    if query_starts[-1] == len(plan_rows):
        positions, row_of_token = starts, plan_rows
    else:
        positions = np.repeat(starts, lengths) + ramps(lengths)
        row_of_token = np.repeat(plan_rows, lengths)
    return _HostColumns(
        rows=plan_rows,
        starts=starts,
        ends=ends,
        lengths=lengths,
        query_starts=query_starts,
        positions=positions,
        slots=slots_for(rows.block_tables, row_of_token, positions, block_size),
        block_tables=rows.block_tables[plan_rows, : num_blocks_for(int(ends.max()), block_size)],
        samples=np.flatnonzero(np.frombuffer(plan.samples, dtype=np.uint8)).astype(np.int32),
    )


def _batch(
    plan: StepPlan, host: _HostColumns, tensors: dict[str, Tensor], rope: RopeTable | None
) -> AttentionBatch:
    return AttentionBatch(
        num_tokens=int(host.query_starts[-1]),
        num_decode=plan.num_decode,
        max_query_length=int(host.lengths.max()),
        max_kv_length=int(host.ends.max()),
        positions=tensors["positions"],
        slots=tensors["slots"].long(),
        query_starts=tensors["query_starts"],
        kv_lengths=tensors["ends"],
        block_tables=tensors["block_tables"],
        host_starts=host.starts,
        host_query_starts=host.query_starts,
        host_kv_lengths=host.ends,
        host_block_tables=host.block_tables,
        cosines=None if rope is None else rope.cosines.index_select(0, tensors["positions"]),
        sines=None if rope is None else rope.sines.index_select(0, tensors["positions"]),
        is_rope_interleaved=rope is not None and rope.is_interleaved,
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
