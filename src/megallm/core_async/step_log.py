"""What an engine says of itself every so many steps: a line in the log, and metrics for a writer.

Named as megatron-core names them, so that a dashboard made for its engine goes on. Knows figures; knows no
engine, and no writer but by its methods.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from megallm.core_async.messages import EngineStats, StepResult

log = logging.getLogger(__name__)


class StepLog:
    """Writes figures after every `interval`th step; `observe` is called in the engine's loop."""

    def __init__(
        self,
        interval: int,
        writer: Any,  # wandb's module or run, a TensorBoard writer, or None
        stats: Callable[[], EngineStats],
    ) -> None:
        """`writer`: something with `log(metrics)`, as wandb, or `add_scalar(name, value, step)`.

        Raises: ValueError for an interval below 1; TypeError for a writer with neither.
        """
        if isinstance(interval, bool) or interval < 1:
            raise ValueError(f"InferenceConfig.logging_step_interval is {interval}; it must be at least 0")
        self._interval = interval
        self._write = _writing(writer)
        self._stats = stats
        self._last_s = time.perf_counter()
        self._num_steps = 0

    def observe(self, result: StepResult) -> None:
        """Counts a step, and says how things stand where it is one of those."""
        now = time.perf_counter()
        step_s, self._last_s = now - self._last_s, now
        self._num_steps += 1
        if self._num_steps % self._interval:
            return
        stats = self._stats()
        log.info(
            "step %d: %.1f ms since the one before; %d requests run, %d wait; of %d blocks %d are used, %d"
            " cached; %.0f %% of prefix tokens were cached; %d preemptions",
            result.step,
            1e3 * step_s,
            stats.running,
            stats.waiting,
            _num_blocks(stats),
            stats.used_blocks,
            stats.cached_blocks,
            100 * stats.prefix_hit_rate,
            stats.preemptions,
        )
        if self._write is not None:
            self._report(metrics_of(stats, result.step, step_s), result.step)

    def _report(self, metrics: dict[str, float], step: int) -> None:
        """Hands metrics to the writer, which is the user's; one that raises gets no more."""
        assert self._write is not None
        try:
            self._write(metrics, step)
        except Exception:
            log.exception("metrics_writer failed, and gets no more metrics of this engine")
            self._write = None


def metrics_of(stats: EngineStats, step: int, step_s: float) -> dict[str, float]:
    """Gives what is written; shares are in percent. `step_s`: since the result before, rests included."""
    num_blocks = max(_num_blocks(stats), 1)
    allocated = stats.used_blocks + stats.cached_blocks
    return {
        "inference/inference_step": step,
        "inference/step_time_s": step_s,
        "inference/waiting_queue_len": stats.waiting,
        "inference/total_requests_dict_size": stats.running + stats.waiting,
        "inference/total_blocks": num_blocks,
        "inference/allocated_blocks": allocated,
        "inference/active_unique_blocks": stats.used_blocks,
        "inference/allocated_utilization": 100 * allocated / num_blocks,
        "inference/active_utilization": 100 * stats.used_blocks / num_blocks,
        "inference/active_request_count": stats.running,
        "inference/total_request_count": stats.running,
        "inference/prefix_hit_rate": 100 * stats.prefix_hit_rate,
        "inference/preemptions": stats.preemptions,
    }


def _num_blocks(stats: EngineStats) -> int:
    return stats.used_blocks + stats.cached_blocks + stats.free_blocks


def _writing(writer: Any) -> Callable[[dict[str, float], int], None] | None:  # Any: see StepLog
    """Gives how to write to a writer."""
    if writer is None:
        return None
    if callable(getattr(writer, "log", None)):
        if callable(getattr(writer, "define_metric", None)):
            writer.define_metric("inference/*", step_metric="inference/inference_step")
        return lambda metrics, _: writer.log(metrics, commit=True)
    if callable(getattr(writer, "add_scalar", None)):

        def add_scalars(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        return add_scalars
    raise TypeError(
        f"InferenceConfig.metrics_writer is a {type(writer).__name__} without log() or add_scalar();"
        " give wandb, a run of it, or a TensorBoard SummaryWriter"
    )
