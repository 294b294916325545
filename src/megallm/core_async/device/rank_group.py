"""The ranks that run one model together: who they are, and small records from each to all.

Knows torch.distributed; knows no model and no step.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, distributed

MAX_RECORD: Final = 1024
"""Bytes of one rank's record."""

_LENGTH_BYTES: Final = 2


class Ranks(Protocol):
    """The ranks of one model, seen from one of them."""

    @property
    def place(self) -> int:
        """This rank's place among them; the rank at place 0 leads."""
        ...

    @property
    def names(self) -> Sequence[int]:
        """The global rank of each, by place."""
        ...

    def exchange(self, record: bytes) -> list[bytes]:
        """Gives every rank's record, by place. All ranks call it, and wait for each other."""
        ...


class RankGroup:
    """`Ranks` over a process group of torch.distributed, whose tensors are on `device`."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.place = distributed.get_rank(group)
        self.names = tuple(distributed.get_process_group_ranks(group))

    def exchange(self, record: bytes) -> list[bytes]:
        """See Ranks. Raises: ValueError for a record that is too long; what torch raises when a rank goes."""
        if len(record) > MAX_RECORD:
            raise ValueError(f"a record of {len(record):,} bytes; ranks exchange {MAX_RECORD:,} at most")
        padded = len(record).to_bytes(_LENGTH_BYTES, "little") + record.ljust(MAX_RECORD, b"\0")
        own = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self._device)
        every = [torch.empty_like(own) for _ in self.names]
        distributed.all_gather(every, own, group=self._group)
        return [_record_of(tensor) for tensor in every]


def _record_of(tensor: Tensor) -> bytes:
    padded = tensor.cpu().numpy().tobytes()
    length = int.from_bytes(padded[:_LENGTH_BYTES], "little")
    return padded[_LENGTH_BYTES:][:length]


def gathered_logits(logits: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Gives `[..., vocab]` on every rank of `[..., vocab / ranks]`: each rank holds a part of the vocabulary.

    megatron's own gather puts the result on the current CUDA device, which a CPU does not have.
    """
    num_ranks = distributed.get_world_size(group)
    parts = [torch.empty_like(logits) for _ in range(num_ranks)]
    distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
