"""What a launcher such as torchrun has told this process of itself. Knows the environment; starts nothing."""

import os
from typing import Final

from msgspec import Struct

_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Launched(Struct, frozen=True):
    """One of the processes that a launcher started together; by default there is one."""

    rank: int = 0
    """Among all of them; 0 leads."""
    num_processes: int = 1
    local_rank: int | None = None
    """Its number on this machine, and that of its GPU."""


def launched() -> Launched:
    """Gives what stands in the environment, where torchrun and its like write it, and where torch reads it.

    Raises: ValueError for what is no number.
    """
    found: dict[str, int] = {}
    for name in _NAMES:
        value = os.environ.get(name, "")
        if value and not value.isdecimal():
            raise ValueError(
                f"the environment has {name}={value!r}, a number is needed; unset it, or start with torchrun"
            )
        if value:
            found[name] = int(value)
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return Launched()
    return Launched(found["RANK"], found["WORLD_SIZE"], found.get("LOCAL_RANK"))
