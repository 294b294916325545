"""A step's tensors as the message they become."""

import torch

from megallm.core_async.device.log_probs import LogProbs
from megallm.core_async.device.queued_step import NOT_FINITE, QueuedStep, StepTensors, StepTimes
from megallm.core_async.device.sampler import Sampled
from megallm.core_async.messages import StepResult, pack_floats, pack_ints, unpack_floats, unpack_ints

TIMES = StepTimes(prepare_s=0.5, forward_s=1.0, sample_s=0.25)


def sampled(*is_finite: bool) -> Sampled:
    """Gives tokens 10, 11, .."""
    return Sampled(tokens=torch.arange(len(is_finite)) + 10, is_finite=torch.tensor(is_finite))


def log_probs(num_top: int) -> LogProbs:
    """Gives two places."""
    return LogProbs(
        chosen=torch.tensor([-1.0, -2.0]),
        top_ids=torch.arange(2 * num_top).view(2, num_top),
        top=-torch.arange(2.0 * num_top).view(2, num_top),
    )


def test_columns_are_in_the_messages_types() -> None:
    """The scheduler reads int32 and float32, whatever the device computed in."""
    tensors = StepTensors(sampled=sampled(True, True), log_probs=log_probs(3), scores=log_probs(1))
    result = QueuedStep(7, tensors, TIMES, is_captured=True).result()
    assert list(unpack_ints(result.tokens)) == [10, 11]
    assert list(unpack_floats(result.log_probs)) == [-1, -2]
    assert result.top is not None
    assert (result.top.num_top, list(unpack_ints(result.top.ids))) == (3, [0, 1, 2, 3, 4, 5])
    assert result.scores == pack_floats([-1.0, -2.0])
    assert result.score_top is not None
    assert result.score_top.ids == pack_ints([0, 1])
    assert (result.step, result.prepare_s, result.forward_s, result.sample_s) == (7, 0.5, 1.0, 0.25)
    assert result.is_captured


def test_nothing_asked_is_nothing_sent() -> None:
    """Empty columns, and no table without a width."""
    assert QueuedStep(1, StepTensors(), StepTimes()).result() == StepResult(step=1, tokens=pack_ints([]))
    result = QueuedStep(1, StepTensors(sampled=sampled(True, True), log_probs=log_probs(0)), TIMES).result()
    assert result.top is None
    assert result.log_probs == pack_floats([-1.0, -2.0])


def test_a_row_without_a_finite_best_fails_alone() -> None:
    """Its token means nothing; its neighbours' do. What was known to have failed keeps its reason."""
    tensors = StepTensors(sampled=sampled(True, False, False), failed=[(2, "grammar")])
    assert QueuedStep(4, tensors, TIMES).result().failed == [(1, NOT_FINITE), (2, "grammar")]
    tensors = StepTensors(sampled=sampled(True, True), failed=[(0, "grammar")])
    assert QueuedStep(4, tensors, TIMES).result().failed == [(0, "grammar")]


def test_best_tokens_of_a_captured_step_say_themselves_which_are_not_finite() -> None:
    """The kernel writes one number a row; a complement is negative, as no token is."""
    told = torch.tensor([5, ~0, 0, ~7], dtype=torch.int32)
    result = QueuedStep(1, StepTensors(told=told), TIMES, is_captured=True).result()
    assert list(unpack_ints(result.tokens)) == [5, 0, 0, 7]
    assert result.failed == [(1, NOT_FINITE), (3, NOT_FINITE)]
