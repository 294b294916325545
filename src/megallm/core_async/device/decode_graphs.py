"""Decode steps as CUDA graphs: one for each batch size of a ladder, from the rows' inputs to their best token.

A launch replays the smallest graph that holds its rows; the rows left over are a scratch row's, which has
a block of its own. All that a replay needs from the host are its rows and positions, in one copy: block
tables and newest tokens stay on the device. Knows the hook, the rows' tensors and the kernels at both ends
of a step. Import it only where it runs, as the kernels.
"""

import bisect
import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from megallm.core_async.device.attention import Attention, AttentionBatch
from megallm.core_async.device.kv_cache import num_blocks_for
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.rows import IntColumn, Rows, SamplingColumns, column_of, ramps
from megallm.core_async.device.step_inputs import StepInputs
from megallm.core_async.device.triton_sampling import decode_tensors, take_best
from megallm.core_async.messages import StepPlan

log = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
SIZE_STEP = 32
"""From the last of the first sizes on."""
STAGING = 4
"""Buffers of the copy to the device: more than the plans in flight, so that none is waited for."""
_NOTHING = np.zeros(0, dtype=np.int32)


def ladder(max_rows: int) -> list[int]:
    """Gives the batch sizes that are captured, the last one `max_rows`."""
    sizes = [*FIRST_SIZES, *range(FIRST_SIZES[-1] + SIZE_STEP, max_rows, SIZE_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class CapturedStep(Struct, frozen=True, eq=False):
    """A graph, and the tensors that its replay fills."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    logits: Tensor
    """`[rows, vocab]`; the next replay of any size overwrites it."""
    tokens: Tensor
    """`[rows]`, int32: each row's best token, which is its newest by now."""
    is_finite: Tensor
    """`[rows]`, bool."""

    def inputs_of(
        self, rows: IntColumn, positions: IntColumn, sampling: SamplingColumns, *, num_top: int
    ) -> StepInputs:
        """Gives what the sampler needs after a replay with `rows`, whose tokens were at `positions`."""
        return replace(
            self.inputs,
            num_samples=len(rows),
            sampled_rows=self.inputs.sampled_rows[: len(rows)].long(),
            host_sampled_rows=rows,
            sampling=sampling,
            sampled_positions=positions + np.int32(1),
            num_top=num_top,
        )


class _Staging:
    """Pinned memory that columns are copied to the device from, some buffers in turn."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(STAGING)]
        self._turn = 0

    def copy(self, columns: list[IntColumn], to: Tensor) -> None:
        """Queues the copy of several columns, one after the other, to the start of `to`."""
        turn = self._turn = (self._turn + 1) % STAGING
        self._copied[turn].synchronize()
        count = sum(map(len, columns))
        np.concatenate(columns, out=self._arrays[turn][:count])
        to[:count].copy_(self._buffers[turn][:count], non_blocking=True)
        self._copied[turn].record()


class DecodeGraphs:
    """The captured decode steps of one runner; all of its methods are called on the rank's thread.

    They read the cache and the weights where these were at `capture`: call `drop` before the cache's memory
    is given back, and `capture` once it is there again.
    """

    def __init__(
        self,
        hook: ModelHook,
        attention: Attention,
        rows: Rows,
        *,
        vocab_size: int,
        max_sequence_length: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        self._hook = hook
        self._attention = attention
        self._rows = rows
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._device = device
        self._scratch_row = len(rows.block_tables)
        max_rows = self._scratch_row
        self._block_tables = torch.full(
            (max_rows + 1, num_blocks_for(max_sequence_length, block_size)),
            scratch_block,
            dtype=torch.int32,
            device=device,
        )
        self._sizes = ladder(max_rows)
        self._columns = torch.empty(2 * max_rows, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._staging = _Staging(2 * max_rows)
        self._padding = np.full(max_rows, self._scratch_row, dtype=np.int32)
        self._zeros = np.zeros(max_rows, dtype=np.int32)
        self._steps: dict[int, CapturedStep] = {}

    def capture(self) -> None:
        """Captures every size, in seconds; says in the log how many."""
        began = time.perf_counter()
        stream = torch.cuda.Stream()
        pool: tuple[int, int] | None = None
        # the largest first: the memory of its inner tensors holds those of all others
        for size in reversed(self._sizes):
            self._put_columns(_NOTHING, _NOTHING, size)
            step = self._step_of(size)
            step()  # compiles kernels, and lets cuBLAS make its handle and workspace
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                # other threads' allocations are none of the capture's business
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    inputs, logits, tokens, is_finite = step()
                finally:
                    graph.capture_end()
            pool = graph.pool()
            self._steps[size] = CapturedStep(graph, inputs, logits, tokens, is_finite)
        torch.cuda.current_stream().wait_stream(stream)
        log.info(
            "captured decode steps of %d sizes up to %d rows in %.1f s",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - began,
        )

    def drop(self) -> None:
        """Frees the graphs and their memory; what is captured again later knows the same block tables."""
        self._steps.clear()

    def follow(self, plan: StepPlan) -> None:
        """Takes the plan's block-table changes to the device; called for every plan, in order."""
        if not plan.blocks:
            return
        counts = column_of(plan.changed_counts)
        rows = np.repeat(column_of(plan.changed_rows), counts)
        entries = np.repeat(column_of(plan.changed_starts), counts) + ramps(counts)
        places = rows * np.int32(self._block_tables.shape[1]) + entries
        pinned = torch.from_numpy(np.stack((places, column_of(plan.blocks)))).pin_memory()
        places_t, blocks_t = pinned.to(self._device, non_blocking=True)
        self._block_tables.view(-1).index_copy_(0, places_t.long(), blocks_t)

    def replay(self, rows: IntColumn, positions: IntColumn) -> CapturedStep:
        """Queues a step of one token for each of `rows`; more tensors' rows are filled than were asked for."""
        size = self._sizes[bisect.bisect_left(self._sizes, len(rows))]
        self._put_columns(rows, positions, size)
        step = self._steps[size]
        step.graph.replay()
        return step

    def _put_columns(self, rows: IntColumn, positions: IntColumn, size: int) -> None:
        spare = size - len(rows)
        self._staging.copy([rows, self._padding[:spare], positions, self._zeros[:spare]], self._columns)

    def _step_of(self, size: int) -> Callable[[], tuple[StepInputs, Tensor, Tensor, Tensor]]:
        rows, positions = self._columns[:size], self._columns[size : 2 * size]
        last_tokens = self._rows.last_tokens

        def step() -> tuple[StepInputs, Tensor, Tensor, Tensor]:
            inputs = self._inputs(rows, positions)
            self._attention.begin_step(inputs.batch)
            logits = self._hook.forward(inputs, _score_nothing)[:, : self._vocab_size]
            return inputs, logits, *take_best(logits, rows, last_tokens)

        return step

    def _inputs(self, rows: Tensor, positions: Tensor) -> StepInputs:
        size, rope = len(rows), self._hook.rope
        tensors = decode_tensors(
            rows, positions, self._rows.last_tokens, self._block_tables, block_size=self._block_size
        )
        batch = AttentionBatch(
            num_tokens=size,
            num_decode=size,
            max_query_length=1,
            max_kv_length=self._block_tables.shape[1] * self._block_size,
            positions=positions,
            slots=tensors.slots,
            query_starts=self._query_starts[: size + 1],
            kv_lengths=tensors.kv_lengths,
            block_tables=self._block_tables,
            table_rows=rows,
            host_starts=_NOTHING,
            host_query_starts=_NOTHING,
            host_kv_lengths=_NOTHING,
            host_block_tables=_NOTHING,
            cosines=None if rope is None else rope.cosines.index_select(0, positions),
            sines=None if rope is None else rope.sines.index_select(0, positions),
            is_rope_interleaved=rope is not None and rope.is_interleaved,
        )
        return StepInputs(
            token_ids=tensors.token_ids,
            batch=batch,
            logit_tokens=None,
            num_samples=size,
            sampled_rows=rows,
            host_sampled_rows=_NOTHING,
            sampling=self._rows.sampling_of(_NOTHING),
            sampled_positions=_NOTHING,
            num_top=0,
            scored_tokens=None,
            targets=None,
        )


def _score_nothing(logits: Tensor, first: int) -> None:
    raise AssertionError(f"a captured step scores {len(logits)} tokens from {first}")
