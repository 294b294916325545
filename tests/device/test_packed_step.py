"""What a step gave, as one column of int32 and back."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from megallm.core_async.device.log_probs import LogProbs
from megallm.core_async.device.packed_step import num_words, packed, unpacked
from megallm.core_async.device.queued_step import StepTensors
from megallm.core_async.device.sampler import Sampled
from megallm.core_async.device.step_inputs import StepInputs
from tests.device.test_step_inputs import built, plan_of, rows_with_tables


def inputs_of(*, num_top: int, num_scored: int, wants_log_probs: bool) -> StepInputs:
    """Gives the inputs of a step that samples two rows."""
    inputs = built(plan_of([(0, 3, 1, True), (2, 5, 1, True)], num_decode=2, tokens=[]), rows_with_tables())
    sampling = replace(inputs.sampling, wants_log_probs=np.array([False, wants_log_probs]))
    targets = torch.zeros(num_scored, dtype=torch.int64) if num_scored else None
    return replace(inputs, num_top=num_top, sampling=sampling, targets=targets)


def logs(places: int, num_top: int) -> LogProbs:
    """Gives log-probs that are all different, an infinity among them."""
    chosen = -torch.arange(1.0, places + 1) / 3
    chosen[0] = -torch.inf
    ids = torch.arange(places * num_top).view(places, num_top)
    return LogProbs(chosen=chosen, top_ids=ids, top=-ids.float() / 7)


def tensors_in(step: StepTensors) -> list[Tensor]:
    """Gives a step's tensors in order."""
    found = [] if step.sampled is None else [step.sampled.tokens, step.sampled.is_finite]
    for each in (step.log_probs, step.scores):
        found += [] if each is None else [each.chosen, each.top_ids.long(), each.top]
    return found


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("num_scored", [0, 5])
@pytest.mark.parametrize("wants_log_probs", [False, True])
def test_what_is_unpacked_is_what_was_packed(num_top: int, num_scored: int, *, wants_log_probs: bool) -> None:
    """To the bit; and every rank knows the length before."""
    inputs = inputs_of(num_top=num_top, num_scored=num_scored, wants_log_probs=wants_log_probs)
    step = StepTensors(
        sampled=Sampled(tokens=torch.tensor([7, 2**31 - 1]), is_finite=torch.tensor([True, False])),
        log_probs=logs(2, num_top) if wants_log_probs else None,
        scores=logs(num_scored, num_top) if num_scored else None,
    )
    words = packed(step)
    assert (words.dtype, len(words)) == (torch.int32, num_words(inputs))
    found, expected = tensors_in(unpacked(words, inputs)), tensors_in(step)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.equal(theirs)


def test_a_step_that_only_scores_has_no_tokens() -> None:
    """Nor has one that computes a chunk anything at all."""
    inputs = built(plan_of([(0, 0, 4, False)], num_decode=0, tokens=[1, 2, 3, 4]), rows_with_tables())
    assert num_words(inputs) == 0
    scoring = replace(inputs, num_top=1, targets=torch.zeros(3, dtype=torch.int64))
    step = unpacked(packed(StepTensors(scores=logs(3, 1))), scoring)
    assert step.sampled is None
    assert step.log_probs is None
    assert len(tensors_in(step)) == len(tensors_in(StepTensors(scores=logs(3, 1))))
