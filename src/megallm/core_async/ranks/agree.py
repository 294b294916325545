"""What all ranks of a model decide together before any starts: the limits, or why there is no engine.

A rank that raised alone would leave the others waiting for it.
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct, structs

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import MAX_RECORD, Ranks
from megallm.core_async.errors import RankLostError
from megallm.core_async.transport.frames import Fault, error_of, fault_of

_MAX_MESSAGE = MAX_RECORD // 2
_MAX_KIND = MAX_RECORD // 4
"""Bytes of an error that travels."""

_LEAST = ("num_blocks", "max_requests", "max_sequence_length", "max_held_blocks")
"""Limits that depend on the memory that is free: the least of any rank holds for all."""

_OWN = ("sampling_seed",)
"""What each replica has for itself."""


class _Offer(Struct, frozen=True, array_like=True):
    """One rank's limits: those of `_LEAST`, and a digest of the rest; or what it raised."""

    limits: tuple[int, ...] = ()
    rest: bytes = b""
    fault: Fault | None = None


def agreed(groups: Sequence[Ranks], derive: Callable[[], EngineConfig]) -> EngineConfig:
    """Gives the limits that every rank can keep. All ranks call it, and return or raise together.

    `groups`: those that this rank is in, in the same order on all: first the ranks of its replica, then
    those of its place in every replica. The cache has as many blocks as the rank with the least memory holds.
    Raises: what `derive` raises on this rank; RankLostError naming another rank that raised;
    ValueError where ranks were given different settings.
    """
    return _together(groups, derive, _limits_of, _least)


def made_by_all[T](groups: Sequence[Ranks], make: Callable[[], T]) -> T:
    """Gives what `make` makes, once every rank has made its own; all return or raise, as from `agreed`."""
    return _together(groups, make, lambda _: _Offer(), lambda own, _: own)


def _together[T](
    groups: Sequence[Ranks],
    make: Callable[[], T],
    offer_of: Callable[[T], _Offer],
    joined: Callable[[T, list[_Offer]], T],
) -> T:
    """Makes this rank's own, offers it to each group in turn, and joins it with what the others offer."""
    own: T | None = None
    error: Exception | None = None
    try:
        own = make()
    except Exception as raised:  # noqa: BLE001 - the other ranks have to hear of whatever it is
        error = raised
    for ranks in groups:
        offer = _failed(error) if own is None else offer_of(own)
        records = ranks.exchange(msgspec.msgpack.encode(offer))
        if own is None:
            continue
        offers = [msgspec.msgpack.decode(record, type=_Offer) for record in records]
        error = _fault_of(ranks.names, offers)
        own = None if error is not None else joined(own, offers)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    assert own is not None, "neither made nor an error"
    return own


def _limits_of(config: EngineConfig) -> _Offer:
    shared = structs.replace(config, **dict.fromkeys((*_LEAST, *_OWN), 0))
    rest = hashlib.sha256(msgspec.msgpack.encode(shared)).digest()
    return _Offer(tuple(getattr(config, name) for name in _LEAST), rest)


def _failed(error: Exception | None) -> _Offer:
    assert error is not None, "neither made nor an error"
    fault = fault_of(error)
    return _Offer(fault=Fault(_cut(fault.kind, _MAX_KIND), _cut(fault.message, _MAX_MESSAGE)))


def _cut(text: str, max_bytes: int) -> str:
    """Gives as much of a text as takes so many bytes; half a surrogate pair has none of its own."""
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _fault_of(names: Sequence[int], offers: list[_Offer]) -> Exception | None:
    """Gives why these ranks do not start."""
    for name, offer in zip(names, offers, strict=True):
        if offer.fault is not None:
            cause = error_of(offer.fault)
            if isinstance(cause, RankLostError):
                return cause  # it says already which rank
            error = RankLostError(f"rank {name} did not start: {offer.fault.message}")
            error.__cause__ = cause
            return error
    for name, offer in zip(names, offers, strict=True):
        if offer.rest != offers[0].rest:
            return ValueError(
                f"rank {name} was given other settings than rank {names[0]}; give every rank of a model"
                " the same inference_config and arguments"
            )
    return None


def _least(config: EngineConfig, offers: list[_Offer]) -> EngineConfig:
    least = [min(values) for values in zip(*(offer.limits for offer in offers), strict=True)]
    return structs.replace(config, **dict(zip(_LEAST, least, strict=True)))
