"""A step captured as a CUDA graph: its tensors, the way of its columns and tokens, and the capture itself.

Knows graphs and pinned memory; does not know what a step computes. Import it only where it runs.
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
from megallm.core_async.device.triton_sampling import TURNS


class StepOutputs(Struct, frozen=True, eq=False):
    """What a step's work leaves on the device."""

    inputs: StepInputs
    logits: Tensor
    """`[samples, vocab]`; the next replay of any graph may overwrite it."""

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


class Replay(Struct, frozen=True, eq=False):
    """A queued replay."""

    outputs: StepOutputs
    told: Tensor
    """`[samples]`, int32, on the host, once the step has run and until `TURNS` more are queued: each sampling
    row's best token, which is its newest by then; its complement where the token's logit is not finite."""
    ended: torch.cuda.Event
    """Once the step has run, and until as many more are queued."""


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
    """What goes to captured steps and comes back, through pinned memory that their kernels read and write.

    Copies before a graph and after it kept the device idle for 23 us a step, of 1.5 ms for a small model.
    Buffers take turns, which the device counts as well: a replay reads and writes those of its turn.
    """

    def __init__(self, num_columns: int, num_rows: int, device: torch.device) -> None:
        """`num_columns`: entries of all columns of a step together; `num_rows`: tokens that come back."""
        self.columns = torch.zeros(num_columns, dtype=torch.int32, device=device)
        """What a step fetched last, from the start. Zeros at first, which may index anything: while kernels
        are compiled, none is fetched."""
        self.sent = torch.zeros((TURNS, num_columns), dtype=torch.int32, pin_memory=True)
        self.told = torch.zeros((TURNS, num_rows), dtype=torch.int32, pin_memory=True)
        """See `Replay.told`."""
        self.turns = torch.zeros(2, dtype=torch.int32, device=device)
        """The turn that comes next on the device, and the one that runs."""
        self._arrays = list(self.sent.numpy())
        self._ended = [torch.cuda.Event() for _ in range(TURNS)]
        self._turn = 0

    def put(self, columns: Sequence[IntColumn]) -> None:
        """Lays several columns out for the next replay, one after the other."""
        # of as many steps ago; only where none of them sampled anything has nobody waited for it before
        self._ended[self._turn].synchronize()
        np.concatenate(columns, out=self._arrays[self._turn][: sum(map(len, columns))])

    def replay(self, step: CapturedStep) -> Replay:
        """Queues a step that fetches what was put last."""
        turn = self._turn
        step.graph.replay()
        self._ended[turn].record()
        self._turn = (turn + 1) % TURNS
        return Replay(outputs=step.outputs, told=self.told[turn], ended=self._ended[turn])

    def restart(self) -> None:
        """Waits for the device, and lets it and the host begin at the first turn."""
        torch.cuda.current_stream().synchronize()
        self.turns.zero_()
        self._turn = 0


def padded(column: IntColumn, size: int, value: int) -> IntColumn:
    """Gives a column filled up to `size`."""
    assert len(column) <= size, f"{len(column)} entries, room for {size}"
    out = np.full(size, value, dtype=np.int32)
    out[: len(column)] = column
    return out
