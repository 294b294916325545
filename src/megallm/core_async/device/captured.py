"""A step captured as a CUDA graph: its tensors, its columns' way to the device, and the capture itself.

Knows graphs and pinned memory; does not know what a step computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from megallm.core_async.device.rows import IntColumn, SamplingColumns
from megallm.core_async.device.step_inputs import StepInputs

STAGING = 4
"""Buffers of the copy to the device: more than the plans in flight, so that none is waited for."""


class StepOutputs(Struct, frozen=True, eq=False):
    """What a step's work leaves on the device."""

    inputs: StepInputs
    logits: Tensor
    """`[samples, vocab]`; the next replay of any graph may overwrite it."""
    tokens: Tensor
    """`[samples]`, int32: each sampling row's best token, which is its newest by now."""
    is_finite: Tensor
    """`[samples]`, bool."""

    def inputs_of(
        self, rows: IntColumn, positions: IntColumn, sampling: SamplingColumns, *, num_top: int
    ) -> StepInputs:
        """Gives what the sampler needs after a replay in which `rows` sample tokens for `positions`."""
        return replace(
            self.inputs,
            num_samples=len(rows),
            sampled_rows=self.inputs.sampled_rows[: len(rows)].long(),
            host_sampled_rows=rows,
            sampling=sampling,
            sampled_positions=positions,
            num_top=num_top,
        )


class CapturedStep(Struct, frozen=True, eq=False):
    """A graph, and the tensors that its replay fills: in full, whatever part of them was asked for."""

    graph: torch.cuda.CUDAGraph
    outputs: StepOutputs


def captured(step: Callable[[], StepOutputs], stream: torch.cuda.Stream, pool: Any) -> CapturedStep:
    """Runs a step once, so that kernels are loaded and libraries set up, and captures it on `stream`.

    `pool` is another graph's, or None. Any: torch's type of it is its own, and changes.
    """
    step()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # other threads' allocations are none of the capture's business
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = step()
        finally:
            graph.capture_end()
    return CapturedStep(graph, outputs)


class Staging:
    """Columns on their way to one place on the device: pinned buffers in turn, one copy a step."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.columns = torch.zeros(size, dtype=torch.int32, device=device)
        """What was copied last, from the start."""
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(STAGING)]
        self._turn = 0

    def copy(self, columns: Sequence[IntColumn]) -> None:
        """Queues the copy of several columns, one after the other."""
        turn = self._turn = (self._turn + 1) % STAGING
        self._copied[turn].synchronize()
        count = sum(map(len, columns))
        np.concatenate(columns, out=self._arrays[turn][:count])
        self.columns[:count].copy_(self._buffers[turn][:count], non_blocking=True)
        self._copied[turn].record()


def padded(column: IntColumn, size: int, value: int) -> IntColumn:
    """Gives a column filled up to `size`."""
    assert len(column) <= size, f"{len(column)} entries, room for {size}"
    out = np.full(size, value, dtype=np.int32)
    out[: len(column)] = column
    return out
