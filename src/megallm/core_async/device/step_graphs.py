"""Steps as CUDA graphs: of decode rows alone, by rows; and of rows and chunks mixed, by tokens.

A launch replays the smallest graph that holds its step; places left over are a scratch row's, which has a
block of its own. All that a replay needs from the host are columns of int32, which it fetches itself; block
tables and newest tokens stay on the device. Steps with more tokens than the largest graph run op by op: they
take the device longer than the host. Knows the hook, the rows' tensors and the kernels at both ends of a
step. Import it only where it runs, as the kernels.
"""

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megallm.core_async.device.attention import Attention, AttentionBatch
from megallm.core_async.device.captured import CapturedStep, Replay, Staging, StepOutputs, captured, padded
from megallm.core_async.device.kv_cache import num_blocks_for
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.rows import IntColumn, Rows, column_of, ramps
from megallm.core_async.device.step_inputs import StepInputs
from megallm.core_async.device.triton_compile import compile_all
from megallm.core_async.device.triton_sampling import fetch, look_up, take_best
from megallm.core_async.messages import StepPlan

log = logging.getLogger(__name__)

_NOTHING = np.zeros(0, dtype=np.int32)
_NEWEST = -1
"""Stands for the token that a row sampled last."""


class StepGraphs:
    """The captured steps of one runner; all of its methods are called on the rank's thread.

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
        row_sizes: list[int],
        token_sizes: list[int],
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
        self._max_rows = self._scratch_row = len(rows.block_tables)
        self._block_tables = torch.full(
            (self._max_rows + 1, num_blocks_for(max_sequence_length, block_size)),
            scratch_block,
            dtype=torch.int32,
            device=device,
        )
        self._row_sizes, self._token_sizes = row_sizes, token_sizes
        most = max(self._token_sizes, default=0)
        self._staging = Staging(3 * most + 6 * self._max_rows + 1, self._max_rows, device)
        self._query_starts = torch.arange(self._max_rows + 1, dtype=torch.int32, device=device)
        self._decodes: dict[int, CapturedStep] = {}
        self._mixed: dict[int, CapturedStep] = {}
        self._is_compiled = False

    def capture(self) -> None:
        """Captures every size, in seconds; says in the log how many."""
        if not self._is_compiled:
            self.compile()
        began = time.perf_counter()
        stream = torch.cuda.Stream()
        pool = None
        for graphs, size, step in self._every_step():
            captured_step = graphs[size] = captured(step, stream, pool)
            pool = captured_step.graph.pool()
        self._staging.restart()
        torch.cuda.current_stream().wait_stream(stream)
        log.info(
            "captured steps of up to %d decode rows in %d sizes, and of mixed tokens in %d, in %.1f s",
            self._max_rows,
            len(self._row_sizes),
            len(self._token_sizes),
            time.perf_counter() - began,
        )

    def compile(self) -> None:
        """Compiles the kernels of every size, beside each other; says in the log how many."""
        began = time.perf_counter()
        count = compile_all(step for _, _, step in self._every_step())
        self._is_compiled = True
        log.info("compiled %d kernels, or read them, in %.1f s", count, time.perf_counter() - began)

    def _every_step(self) -> Iterator[tuple[dict[int, CapturedStep], int, Callable[[], StepOutputs]]]:
        """Gives where each size's graph belongs, the size, and its step, when its columns are there.

        The largest come first: the memory of their inner tensors holds those of all others.
        """
        for size in reversed(self._token_sizes):
            self._staging.restart()
            self._put_mixed(StepPlan.empty(), size)
            yield self._mixed, size, self._mixed_step_of(size)
        for size in reversed(self._row_sizes):
            self._staging.restart()
            self._put_decodes(_NOTHING, _NOTHING, size)
            yield self._decodes, size, self._decode_step_of(size)

    def drop(self) -> None:
        """Frees the graphs and their memory; what is captured again later knows the same block tables."""
        self._decodes.clear()
        self._mixed.clear()

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

    def replay(self, plan: StepPlan) -> Replay | None:
        """Queues a plan's step; None where no graph holds it, and nothing is queued."""
        rows = column_of(plan.rows)
        if plan.targets:
            return None
        if plan.num_decode == len(rows) and plan.samples.count(1) == len(rows):
            size = self._row_sizes[bisect.bisect_left(self._row_sizes, len(rows))]
            self._put_decodes(rows, column_of(plan.starts), size)
            step = self._decodes[size]
        else:
            num_tokens = plan.num_decode + len(column_of(plan.tokens))
            place = bisect.bisect_left(self._token_sizes, max(num_tokens, len(rows)))
            if place == len(self._token_sizes):
                return None
            size = self._token_sizes[place]
            self._put_mixed(plan, size)
            step = self._mixed[size]
        return self._staging.replay(step)

    # ---- steps of decode rows ------------------------------------------------------------------

    def _put_decodes(self, rows: IntColumn, positions: IntColumn, size: int) -> None:
        self._staging.put([padded(rows, size, self._scratch_row), padded(positions, size, 0)])

    def _decode_step_of(self, size: int) -> Callable[[], StepOutputs]:
        fetch_columns, (rows, positions) = self._columns([size, size])

        def step() -> StepOutputs:
            fetch_columns()
            tokens = look_up(
                rows, positions, self._rows.last_tokens, self._block_tables, block_size=self._block_size
            )
            batch = self._batch(
                num_tokens=size,
                num_decode=size,
                positions=positions,
                slots=tokens.slots,
                query_starts=self._query_starts[: size + 1],
                kv_lengths=tokens.kv_lengths,
                table_rows=rows,
                chunk_lengths=None,
            )
            return self._run(tokens.token_ids, batch, logit_tokens=None, sampled_rows=rows)

        return step

    # ---- mixed steps ---------------------------------------------------------------------------

    def _put_mixed(self, plan: StepPlan, size: int) -> None:
        rows, starts, lengths = column_of(plan.rows), column_of(plan.starts), column_of(plan.lengths)
        num_rows, decodes = min(size, self._max_rows), plan.num_decode
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = starts + lengths
        samples = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.uint8))
        newest = np.full(decodes, _NEWEST, dtype=np.int32)
        chunk_lengths = ends.copy()
        chunk_lengths[:decodes] = 0
        self._staging.put(
            [
                padded(np.concatenate((newest, column_of(plan.tokens))), size, 0),
                padded(np.repeat(rows, lengths), size, self._scratch_row),
                padded(np.repeat(starts, lengths) + ramps(lengths), size, 0),
                padded(rows, num_rows, self._scratch_row),
                padded(ends[:decodes], num_rows, 0),
                padded(chunk_lengths, num_rows, 0),
                padded(query_starts[1:][samples] - 1, num_rows, 0),
                padded(rows[samples], num_rows, self._scratch_row),
                padded(query_starts, num_rows + 1, int(query_starts[-1])),
            ]
        )

    def _mixed_step_of(self, size: int) -> Callable[[], StepOutputs]:
        num_rows = min(size, self._max_rows)
        fetch_columns, columns = self._columns([size] * 3 + [num_rows] * 5 + [num_rows + 1])
        known, token_rows, positions, *of_rows = columns
        table_rows, decode_lengths, chunk_lengths, logit_tokens, sampled_rows, query_starts = of_rows

        def step() -> StepOutputs:
            fetch_columns()
            tokens = look_up(
                token_rows,
                positions,
                self._rows.last_tokens,
                self._block_tables,
                block_size=self._block_size,
                known=known,
            )
            batch = self._batch(
                num_tokens=size,
                num_decode=num_rows,
                positions=positions,
                slots=tokens.slots,
                query_starts=query_starts,
                kv_lengths=decode_lengths,
                table_rows=table_rows,
                chunk_lengths=chunk_lengths,
            )
            return self._run(tokens.token_ids, batch, logit_tokens=logit_tokens, sampled_rows=sampled_rows)

        return step

    # ---- both ----------------------------------------------------------------------------------

    def _columns(self, sizes: Sequence[int]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Gives what fetches a step's columns, and the columns."""
        staging, columns = self._staging, self._staging.columns[: sum(sizes)]
        return partial(fetch, staging.sent, staging.turns, columns), columns.split(list(sizes))

    def _batch(
        self,
        *,
        num_tokens: int,
        num_decode: int,
        positions: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        kv_lengths: Tensor,
        table_rows: Tensor,
        chunk_lengths: Tensor | None,
    ) -> AttentionBatch:
        rope = self._hook.rope
        return AttentionBatch(
            num_tokens=num_tokens,
            num_decode=num_decode,
            max_query_length=num_tokens,
            max_kv_length=self._block_tables.shape[1] * self._block_size,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            block_tables=self._block_tables,
            table_rows=table_rows,
            chunk_lengths=chunk_lengths,
            host_starts=_NOTHING,
            host_query_starts=_NOTHING,
            host_kv_lengths=_NOTHING,
            host_block_tables=_NOTHING,
            cosines=None if rope is None else rope.cosines.index_select(0, positions),
            sines=None if rope is None else rope.sines.index_select(0, positions),
            is_rope_interleaved=rope is not None and rope.is_interleaved,
        )

    def _run(
        self, token_ids: Tensor, batch: AttentionBatch, *, logit_tokens: Tensor | None, sampled_rows: Tensor
    ) -> StepOutputs:
        inputs = StepInputs(
            token_ids=token_ids,
            batch=batch,
            logit_tokens=logit_tokens,
            num_samples=len(sampled_rows),
            sampled_rows=sampled_rows,
            host_sampled_rows=_NOTHING,
            sampling=self._rows.sampling_of(_NOTHING),
            sampled_positions=_NOTHING,
            num_top=0,
            scored_tokens=None,
            targets=None,
        )
        self._attention.begin_step(batch)
        logits = self._hook.forward(inputs, _score_nothing)[:, : self._vocab_size]
        staging = self._staging
        take_best(logits, sampled_rows, self._rows.last_tokens, staging.turns, staging.told)
        return StepOutputs(inputs=inputs, logits=logits)


def _score_nothing(logits: Tensor, first: int) -> None:
    raise AssertionError(f"a captured step scores {len(logits)} tokens from {first}")
