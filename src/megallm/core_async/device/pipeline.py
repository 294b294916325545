"""The stages of a model that is split by layers: hidden states go down, what the last one sampled goes round.

Knows torch.distributed and one pipeline-parallel group; imports no megatron. Nothing of a step waits for a
CUDA device: each call queues its transfer, and later work of the stream is behind it.
"""

import torch
from msgspec import Struct
from torch import Tensor, distributed, nn

from megallm.core_async.device.model_options import device_of, unwrapped
from megallm.core_async.errors import UnsupportedModelError


def check_stage(model: nn.Module, group: distributed.ProcessGroup | None, *, leads: bool) -> None:
    """Checks that a model is the part of a pipeline that its rank has; None is a model without stages.

    `leads`: the rank leads the engine's ranks. Raises: UnsupportedModelError with what is to be built.
    """
    part = unwrapped(model)
    place, count = (
        (0, 1) if group is None else (distributed.get_rank(group), distributed.get_world_size(group))
    )
    expected = (place == 0, place == count - 1)
    if (part.pre_process, part.post_process) != expected:
        raise UnsupportedModelError(
            f"this rank is stage {place + 1} of {count} of megatron's pipeline, and its model was built with"
            f" pre_process={part.pre_process} and post_process={part.post_process}; build it with"
            f" pre_process={expected[0]} and post_process={expected[1]}, or set up megatron's groups with the"
            " pipeline_model_parallel_size that it was built for"
        )
    if leads and place:
        raise UnsupportedModelError(
            f"the first rank of the model-parallel group is stage {place + 1} of {count}; it leads the engine"
            " and must be the first stage: list the ranks of that group in the order of their stages"
        )


def pipeline_of(model: nn.Module, group: distributed.ProcessGroup | None) -> "Pipeline | None":
    """Gives the pipeline that a checked model is a stage of."""
    if group is None:
        return None
    config = unwrapped(model).config
    dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    return Pipeline(group, HiddenStates(config.hidden_size, dtype, device_of(model)))


class HiddenStates(Struct, frozen=True):
    """What a token is between two stages."""

    size: int
    dtype: torch.dtype
    device: torch.device


class Pipeline:
    """This rank's stage, among those of its pipeline-parallel group. Used by the rank's thread alone.

    Every rank of the group makes the same calls for the same step, `receive` and `send` between neighbours.
    """

    def __init__(self, group: distributed.ProcessGroup, hidden: HiddenStates) -> None:
        names = distributed.get_process_group_ranks(group)
        place = distributed.get_rank(group)
        self.is_first = place == 0
        """It takes token ids, and no hidden states."""
        self.is_last = place == len(names) - 1
        """It samples."""
        self._group = group
        self._hidden = hidden
        self._before = names[place - 1]
        self._after = names[(place + 1) % len(names)]
        self._last = names[-1]

    def receive(self, num_tokens: int) -> Tensor:
        """Gives `[num_tokens, 1, hidden]` of the stage before; new memory, the caller's own."""
        assert not self.is_first, "the first stage has none before it"
        hidden = self._hidden
        states = torch.empty(num_tokens, 1, hidden.size, dtype=hidden.dtype, device=hidden.device)
        distributed.recv(states, self._before, group=self._group)
        return states

    def send(self, states: Tensor) -> None:
        """Hands `[tokens, 1, hidden]` to the stage after this one."""
        assert not self.is_last, "the last stage has none after it"
        hidden = self._hidden
        assert (states.shape[1:], states.dtype) == ((1, hidden.size), hidden.dtype), (
            f"hidden states are {tuple(states.shape)} of {states.dtype}; the next stage expects"
            f" [tokens, 1, {hidden.size}] of {hidden.dtype}"
        )
        distributed.send(states.contiguous(), self._after, group=self._group)

    def share(self, words: Tensor | None, num_words: int) -> Tensor:
        """Gives every stage the last one's `words`, `[num_words]` of int32; others pass None."""
        if words is None:
            words = torch.empty(num_words, dtype=torch.int32, device=self._hidden.device)
        assert words.shape == (num_words,), f"{tuple(words.shape)} words; the stages expect {num_words}"
        distributed.broadcast(words, self._last, group=self._group)
        return words
