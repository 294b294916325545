"""Every so many steps a line in the log, and metrics to whoever the config names."""

import logging
from typing import Any

import pytest

from megallm.core_async.messages import EngineStats, StepResult, pack_ints
from megallm.core_async.step_log import StepLog, metrics_of
from tests.small_llm import expected, greedy, settings, sync_llm, tokens_of

STATS = EngineStats(
    step=8, running=3, waiting=2, used_blocks=20, cached_blocks=5, free_blocks=75, prefix_hit_rate=0.25
)


class Wandb:
    """What is used of wandb's module."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def define_metric(self, name: str, *, step_metric: str) -> None:
        """Notes what is drawn over what."""
        self.defined.append((name, step_metric))

    def log(self, metrics: dict[str, Any], *, commit: bool) -> None:
        """Notes metrics."""
        assert commit
        if self.error is not None:
            raise self.error
        self.logged.append(metrics)


class TensorBoard:
    """What is used of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Notes a scalar."""
        self.scalars[name, step] = value


def run_steps(interval: int, writer: object, num_steps: int) -> None:
    """Observes some steps."""
    steps = StepLog(interval, writer, lambda: STATS)
    for step in range(1, num_steps + 1):
        steps.observe(StepResult(step=step, tokens=pack_ints([])))


def test_every_so_many_steps_a_line_says_how_things_stand(caplog: pytest.LogCaptureFixture) -> None:
    """With the figures an operator looks for first."""
    with caplog.at_level(logging.INFO):
        run_steps(3, None, 8)
    first, second = caplog.messages
    assert first.startswith("step 3: ")
    assert second.startswith("step 6: ")
    assert "3 requests run, 2 wait; of 100 blocks 20 are used, 5 cached; 25 %" in second


def test_metrics_go_to_wandb_over_a_step_axis_of_their_own() -> None:
    """As megatron-core's engine does, beside the training's steps."""
    writer = Wandb()
    run_steps(2, writer, 5)
    assert writer.defined == [("inference/*", "inference/inference_step")]
    assert [metrics["inference/inference_step"] for metrics in writer.logged] == [2, 4]
    assert all(name.startswith("inference/") for name in writer.logged[0])


def test_metrics_go_to_tensorboard_too() -> None:
    """A writer is known by its methods."""
    writer = TensorBoard()
    run_steps(2, writer, 5)
    assert {step for _, step in writer.scalars} == {2, 4}
    assert writer.scalars["inference/waiting_queue_len", 4] == 2


def test_shares_are_in_percent_and_counts_are_the_engines() -> None:
    """Under megatron-core's names."""
    metrics = metrics_of(STATS, 8, 0.5)
    assert metrics["inference/allocated_utilization"] == 25
    assert metrics["inference/active_utilization"] == 20
    assert (metrics["inference/total_requests_dict_size"], metrics["inference/step_time_s"]) == (5, 0.5)
    assert metrics_of(EngineStats(), 1, 0.0)["inference/active_utilization"] == 0


def test_a_writer_that_fails_gets_no_more_and_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A dashboard out of reach must not end the requests of everybody."""
    writer = Wandb()
    writer.error = ConnectionError("no route")
    with caplog.at_level(logging.INFO):
        run_steps(1, writer, 3)
    assert sum("metrics_writer failed" in message for message in caplog.messages) == 1
    assert len([message for message in caplog.messages if message.startswith("step")]) == 3


@pytest.mark.parametrize("interval", [-1, 0, True])
def test_an_interval_is_at_least_one_step(interval: int) -> None:
    """0 is off, which is said by making none."""
    with pytest.raises(ValueError, match="logging_step_interval"):
        StepLog(interval, None, lambda: STATS)


def test_a_writer_that_can_not_write_is_refused() -> None:
    """At the start, by name; upstream finds out at the first interval, and dies."""
    with pytest.raises(TypeError, match=r"metrics_writer is a object without log\(\) or add_scalar\(\)"):
        StepLog(1, object(), lambda: STATS)


def test_an_engine_reports_as_its_config_says() -> None:
    """The config's fields reach it, and its requests do not notice."""
    writer = Wandb()
    with sync_llm(config=settings(logging_step_interval=4, metrics_writer=writer)) as llm:
        assert tokens_of(llm.generate(["A", "B"], greedy(12))) == [expected("A", 12), expected("B", 12)]
        assert writer.logged[0]["inference/inference_step"] == 4
        assert writer.logged[0]["inference/active_request_count"] == 2
        assert writer.logged[0]["inference/allocated_blocks"] > 0
