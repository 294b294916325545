"""A process group whose ranks are threads of this process: tensors go by queues."""

from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from torch import Tensor, distributed

NAMES = (4, 6, 7)
"""Global ranks, so that no test mixes them up with places."""


class ThreadGroup:
    """One rank's view of a group of up to three."""

    def __init__(self, place: int, size: int, sent: "Sent") -> None:
        self.place = place
        self.names = list(NAMES[:size])
        self.sent = sent

    @property
    def name(self) -> int:
        """This rank's global one."""
        return self.names[self.place]


class Sent(defaultdict[tuple[int, int], SimpleQueue[Tensor]]):
    """Tensors on their way, by sender and receiver."""

    def __init__(self) -> None:
        super().__init__(SimpleQueue)


def groups_of(size: int, monkeypatch: pytest.MonkeyPatch) -> list[ThreadGroup]:
    """Gives each rank's view of one group, which torch.distributed takes for a group of its own."""

    def fact_of(name: str, of_threads: Callable[[ThreadGroup], object]) -> Callable[..., object]:
        megatrons = getattr(distributed, name)

        def fact(group: object = None) -> object:
            return of_threads(group) if isinstance(group, ThreadGroup) else megatrons(group)

        return fact

    stand_ins: dict[str, Callable[..., object]] = {
        "get_rank": fact_of("get_rank", lambda group: group.place),
        "get_world_size": fact_of("get_world_size", lambda group: len(group.names)),
        "get_process_group_ranks": fact_of("get_process_group_ranks", lambda group: group.names),
        "send": _send,
        "recv": _receive,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(distributed, name, stand_in)
    sent = Sent()
    return [ThreadGroup(place, size, sent) for place in range(size)]


def _send(tensor: Tensor, dst: int, group: ThreadGroup) -> None:
    group.sent[group.name, dst].put(tensor.clone())


def _receive(tensor: Tensor, src: int, group: ThreadGroup) -> None:
    tensor.copy_(group.sent[src, group.name].get(timeout=10))


def _broadcast(tensor: Tensor, src: int, group: ThreadGroup) -> None:
    if group.name != src:
        _receive(tensor, src, group)
        return
    for name in set(group.names) - {src}:
        _send(tensor, name, group)


def _all_gather(every: list[Tensor], own: Tensor, group: ThreadGroup) -> None:
    for name in group.names:
        _send(own, name, group)
    for tensor, name in zip(every, group.names, strict=True):
        _receive(tensor, name, group)
