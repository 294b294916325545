"""The base of every question between actors."""

from msgspec import Struct


class Ask[R](Struct, frozen=True):
    """A message that expects one reply of type R."""
