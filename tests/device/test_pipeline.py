"""Stages of a pipeline, on threads of this process; as processes they are tested in tests/ranks."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megallm.core_async.device.pipeline import HiddenStates, Pipeline, check_stage, pipeline_of
from megallm.core_async.device.queued_step import NOT_FINITE, QueuedStep
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.messages import Sampling, StepPlan
from megallm.models.megatron_setup import quiet_megatron
from tests.device.conftest import built
from tests.device.models import Megatron, gpt, plain_continuation
from tests.device.plans import GREEDY, Planner, engine_config
from tests.device.thread_group import groups_of

HIDDEN = HiddenStates(size=3, dtype=torch.float32, device=torch.device("cpu"))


def pipelines_of(size: int, monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Gives each stage's."""
    groups: list[Any] = groups_of(size, monkeypatch)  # Any: they stand in for torch's
    return [Pipeline(group, HIDDEN) for group in groups]


def together[T](*calls: Callable[[], T]) -> list[T]:
    """Makes calls at the same time, each on its stage's thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_states_go_from_stage_to_stage_and_words_from_the_last_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage in the middle does both, and none takes another's part."""
    first, middle, last = pipelines_of(3, monkeypatch)
    assert [(each.is_first, each.is_last) for each in (first, middle, last)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    states, words = torch.arange(12.0).view(4, 1, 3), torch.tensor([5, 6], dtype=torch.int32)

    def run_first() -> list[Tensor]:
        first.send(states)
        return [first.share(None, 2)]

    def run_middle() -> list[Tensor]:
        received = middle.receive(4)
        middle.send(received + 1)
        return [received, middle.share(None, 2)]

    def run_last() -> list[Tensor]:
        return [last.receive(4), last.share(words, 2)]

    (told,), (received, told_too), (ended, own) = together(run_first, run_middle, run_last)
    assert received.equal(states)
    assert ended.equal(states + 1)
    for each in (told, told_too, own):
        assert each.equal(words)


def test_states_of_another_shape_or_dtype_are_a_broken_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that receives would wait for bytes that never come."""
    first, last = pipelines_of(2, monkeypatch)
    for wrong in (torch.zeros(4, 1, 5), torch.zeros(4, 3), torch.zeros(4, 1, 3).double()):
        with pytest.raises(AssertionError, match=r"the next stage expects \[tokens, 1, 3\] of torch.float32"):
            first.send(wrong)
    with pytest.raises(AssertionError, match="the stages expect 3"):
        last.share(torch.zeros(2, dtype=torch.int32), 3)


def test_a_part_that_is_not_its_ranks_is_refused(model: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built with other groups than those that are set up now."""
    groups: list[Any] = groups_of(2, monkeypatch)  # Any: they stand in for torch's
    check_stage(model, None, leads=True)
    assert pipeline_of(model, None) is None
    with pytest.raises(
        UnsupportedModelError, match=r"stage 2 of 2 .* pre_process=True and post_process=True"
    ):
        check_stage(model, groups[1], leads=False)
    with monkeypatch.context() as patched:
        patched.setattr(model, "post_process", False)
        check_stage(model, groups[0], leads=True)
        with pytest.raises(
            UnsupportedModelError, match=r"stage 1 of 1 .* build it with pre_process=True and"
        ):
            check_stage(model, None, leads=True)
    monkeypatch.setattr(model, "pre_process", False)
    with pytest.raises(
        UnsupportedModelError, match="stage 2 of 2; it leads the engine and must be the first"
    ):
        check_stage(model, groups[1], leads=True)


class TwoStages:
    """Two runners as one: each launch runs on both stages' threads, and the first one's result counts."""

    def __init__(self, runners: list[TorchRunner]) -> None:
        self._runners = runners

    def launch(self, plan: StepPlan) -> QueuedStep:
        """See TorchRunner."""
        return together(*(lambda runner=runner: runner.launch(plan) for runner in self._runners))[0]


@contextmanager
def two_stages(whole: Megatron, monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[Planner, list[Megatron]]]:
    """Runs the small model as two layers with the embedding, and one with the output layer."""
    with quiet_megatron():
        parts = [
            gpt(num_layers=2, model={"post_process": False}),
            gpt(num_layers=1, model={"pre_process": False}),
        ]
    weights = dict(whole.named_parameters())
    for part, first in zip(parts, (0, 2), strict=True):
        for name, parameter in part.named_parameters():
            parameter.data.copy_(weights[name.replace("layers.0", f"layers.{first}")])
    groups: list[Any] = groups_of(2, monkeypatch)  # Any: they stand in for torch's
    limits = engine_config()
    runners: list[Any] = [  # Any: two of them stand in for one
        TorchRunner(part, limits, None, pipeline_of(part, group))
        for part, group in zip(parts, groups, strict=True)
    ]
    for runner in runners:
        runner.start()
    both: Any = TwoStages(runners)  # Any: the same
    yield Planner(both, limits), parts
    for runner in runners:
        runner.close()


def test_two_stages_give_what_the_whole_model_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probs and scores reach the first stage, which needs them; a chunk has none."""
    whole, prompts = built("grouped heads"), [[3, 1, 4, 1, 5], [9, 2, 6]]
    asks = Sampling(temperature=0.0, wants_log_probs=True, num_top=2, presence_penalty=0.5)
    limits = engine_config()
    runner = TorchRunner(whole, limits)
    runner.start()
    seen: list[tuple[list[int], object]] = []

    def run(planner: Planner) -> None:
        plain, asking = planner.add(prompts[0]), planner.add(prompts[1], asks, scores_prompt=True)
        planner.step((plain, 2))
        planner.decode(plain, asking, num_steps=4)
        logged = asking.log_probs, asking.top, asking.scores, asking.score_top
        seen.append((plain.output, (asking.output, *logged)))

    try:
        run(Planner(runner, limits))
    finally:
        runner.close()
    with two_stages(whole, monkeypatch) as (planner, parts):
        run(planner)
        assert all(part.decoder.input_tensor is None for part in parts), "a step's states were left behind"
    assert seen[0] == seen[1]
    assert seen[0][0] == plain_continuation(whole, prompts[0], 4)


def test_a_row_with_broken_logits_fails_on_the_first_stage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That stage leads, and ends the request."""
    with two_stages(built("grouped heads"), monkeypatch) as (planner, parts):
        parts[1].output_layer.weight.data[7] = torch.nan
        sequence = planner.add([1, 2], GREEDY)
        assert planner.step((sequence, 2)).failed == [(0, NOT_FINITE)]
