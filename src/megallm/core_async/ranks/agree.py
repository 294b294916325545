"""What all ranks of a model decide together before any starts: the limits, or why there is no engine."""

import hashlib
from collections.abc import Callable

import msgspec
from msgspec import Struct, structs

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import MAX_RECORD, Ranks
from megallm.core_async.errors import RankLostError
from megallm.core_async.transport.frames import Fault, error_of, fault_of

_MAX_MESSAGE = MAX_RECORD // 4
"""Characters of an error that travels: a character may take four bytes."""


_LEAST = ("num_blocks", "max_requests", "max_sequence_length", "max_held_blocks")
"""Limits that depend on the memory that is free: the least of any rank holds for all."""


class _Offer(Struct, frozen=True, array_like=True):
    """One rank's limits: those of `_LEAST`, and a digest of the rest."""

    limits: tuple[int, ...] = ()
    rest: bytes = b""
    fault: Fault | None = None


def agreed(ranks: Ranks | None, derive: Callable[[], EngineConfig]) -> EngineConfig:
    """Gives the limits that every rank can keep. All ranks call it, and return or raise together.

    The cache has as many blocks as the rank with the least memory free holds.
    Raises: what `derive` raises on this rank; RankLostError naming another rank that raised;
    ValueError where ranks were given different settings.
    """
    if ranks is None:
        return derive()
    try:
        config = derive()
    except Exception as error:
        fault = fault_of(error)
        ranks.exchange(_encoded(_Offer(fault=Fault(fault.kind, fault.message[:_MAX_MESSAGE]))))
        raise
    rest = msgspec.msgpack.encode(structs.replace(config, **dict.fromkeys(_LEAST, 0)))
    offer = _Offer(tuple(getattr(config, name) for name in _LEAST), hashlib.sha256(rest).digest())
    offers = [msgspec.msgpack.decode(record, type=_Offer) for record in ranks.exchange(_encoded(offer))]
    for name, other in zip(ranks.names, offers, strict=True):
        if other.fault is not None:
            why = other.fault.message
            raise RankLostError(f"rank {name} did not start: {why}") from error_of(other.fault)
    for name, other in zip(ranks.names, offers, strict=True):
        if other.rest != offers[0].rest:
            raise ValueError(
                f"rank {name} was given other settings than rank {ranks.names[0]}; give every rank of a model"
                " the same inference_config and arguments"
            )
    least = [min(values) for values in zip(*(other.limits for other in offers), strict=True)]
    return structs.replace(config, **dict(zip(_LEAST, least, strict=True)))


def _encoded(offer: _Offer) -> bytes:
    return msgspec.msgpack.encode(offer)
