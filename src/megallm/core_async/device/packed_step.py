"""What a step sampled and scored, as one column of int32 whose layout every rank reads from its inputs.

Knows tensors of a step; knows no rank and no transfer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megallm.core_async.device.log_probs import LogProbs
from megallm.core_async.device.queued_step import StepTensors
from megallm.core_async.device.sampler import Sampled
from megallm.core_async.device.step_inputs import StepInputs


def num_words(inputs: StepInputs) -> int:
    """Gives the length of a step's column; 0 where nothing is sampled or scored."""
    return sum(_sizes(inputs))


def packed(tensors: StepTensors) -> Tensor:
    """Gives the column; floats keep their bits. `failed` is not in it."""
    parts: list[Tensor] = []
    if tensors.sampled is not None:
        parts += [tensors.sampled.tokens.int(), tensors.sampled.is_finite.int()]
    for logs in (tensors.log_probs, tensors.scores):
        if logs is not None:
            parts += [_bits(logs.chosen), logs.top_ids.int(), _bits(logs.top)]
    return torch.cat([part.flatten() for part in parts])


def unpacked(words: Tensor, inputs: StepInputs) -> StepTensors:
    """Gives what was packed on the rank that sampled, for the same step's inputs."""
    parts = iter(words.split(_sizes(inputs)))
    tokens, is_finite = next(parts), next(parts)
    return StepTensors(
        sampled=Sampled(tokens=tokens.long(), is_finite=is_finite.bool()) if inputs.num_samples else None,
        log_probs=_logs(parts, inputs.num_top) if _num_logged(inputs) else None,
        scores=_logs(parts, inputs.num_top) if inputs.targets is not None else None,
    )


def _sizes(inputs: StepInputs) -> list[int]:
    num_logged = _num_logged(inputs)
    num_scored = 0 if inputs.targets is None else len(inputs.targets)
    sizes = [inputs.num_samples, inputs.num_samples]
    for count in (num_logged, num_scored):
        if count:
            sizes += [count, count * inputs.num_top, count * inputs.num_top]
    return sizes


def _num_logged(inputs: StepInputs) -> int:
    """Gives how many sampled tokens have log-probs: all, once any row asks."""
    return inputs.num_samples if inputs.sampling.wants_log_probs.any() else 0


def _logs(parts: Iterator[Tensor], num_top: int) -> LogProbs:
    chosen, top_ids, top = next(parts), next(parts), next(parts)
    shape = len(chosen), num_top
    return LogProbs(
        chosen=chosen.view(torch.float32),
        top_ids=top_ids.view(shape),
        top=top.view(torch.float32).view(shape),
    )


def _bits(floats: Tensor) -> Tensor:
    return floats.contiguous().view(torch.int32)
