"""What a rank keeps for each row of the batch, from step to step, kept up by the plan's differences.

A row is a place that requests take one after the other. Knows nothing of requests, of attention or of
who owns which block.
"""

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from megallm.core_async.device.kv_cache import num_blocks_for
from megallm.core_async.messages import Ints, StepPlan

IntColumn = NDArray[np.int32]


def column_of(ints: Ints) -> IntColumn:
    """Gives a message's column as an array that shares its memory; read-only."""
    return np.frombuffer(ints, dtype=np.int32)


def ramps(counts: IntColumn) -> IntColumn:
    """Gives 0, 1, .. count - 1 for each count, one after the other."""
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts)


class SamplingColumns(Struct, frozen=True, eq=False):
    """How the next token of each of some rows is chosen: one entry a row, see messages.Sampling."""

    temperature: NDArray[np.float32]
    top_k: IntColumn
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    wants_log_probs: NDArray[np.bool_]
    num_top: IntColumn

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Which rows take their best token, and draw none."""
        return (self.temperature == 0) | (self.top_k == 1)

    def take(self, places: IntColumn | NDArray[np.int64]) -> "SamplingColumns":
        """Gives the entries at `places`, copied."""
        return SamplingColumns(
            temperature=self.temperature[places],
            top_k=self.top_k[places],
            top_p=self.top_p[places],
            min_p=self.min_p[places],
            seed=self.seed[places],
            wants_log_probs=self.wants_log_probs[places],
            num_top=self.num_top[places],
        )


class Rows:
    """Block tables and sampling numbers on the host; the token each row sampled last on the device.

    The rank's thread alone changes it: `apply` before a step, the sampled tokens after it.
    """

    def __init__(
        self, *, max_requests: int, max_sequence_length: int, block_size: int, device: torch.device
    ) -> None:
        max_blocks = num_blocks_for(max_sequence_length, block_size)
        self.block_tables = np.zeros((max_requests, max_blocks), dtype=np.int32)
        """`[max_requests, max_blocks]`; what a row's request does not reach means nothing."""
        self.last_tokens = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        """`[max_requests + 1]`; the last is for what fills up a batch."""
        self._sampling = SamplingColumns(
            temperature=np.ones(max_requests, dtype=np.float32),
            top_k=np.zeros(max_requests, dtype=np.int32),
            top_p=np.zeros(max_requests, dtype=np.float32),
            min_p=np.zeros(max_requests, dtype=np.float32),
            seed=np.zeros(max_requests, dtype=np.uint64),
            wants_log_probs=np.zeros(max_requests, dtype=np.bool_),
            num_top=np.zeros(max_requests, dtype=np.int32),
        )

    def apply(self, plan: StepPlan) -> None:
        """Takes the plan's new rows and block-table changes."""
        if plan.new_rows:
            taken = [setup.row for setup in plan.new_rows]
            sampling = [setup.sampling for setup in plan.new_rows]
            kept = self._sampling
            kept.temperature[taken] = [numbers.temperature for numbers in sampling]
            kept.top_k[taken] = [numbers.top_k for numbers in sampling]
            kept.top_p[taken] = [numbers.top_p for numbers in sampling]
            kept.min_p[taken] = [numbers.min_p for numbers in sampling]
            kept.seed[taken] = np.array([numbers.seed for numbers in sampling], dtype=np.uint64)
            kept.wants_log_probs[taken] = [numbers.wants_log_probs for numbers in sampling]
            kept.num_top[taken] = [numbers.num_top for numbers in sampling]
        if plan.blocks:
            changed_counts = column_of(plan.changed_counts)
            rows = np.repeat(column_of(plan.changed_rows), changed_counts)
            entries = np.repeat(column_of(plan.changed_starts), changed_counts) + ramps(changed_counts)
            self.block_tables[rows, entries] = column_of(plan.blocks)

    def num_top_of(self, rows: IntColumn) -> int:
        """Gives how many of the likeliest tokens any of some rows asks for."""
        return int(self._sampling.num_top[rows].max())

    def sampling_of(self, rows: IntColumn) -> SamplingColumns:
        """Gives the sampling numbers of some rows, copied."""
        return self._sampling.take(rows)
