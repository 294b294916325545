"""Which tokens of which requests run next. Pure; knows no block ids, no loop, no tensor.

Decodes go first, then prompts already begun, then admissions in the order of the waiting line. The
token budget bounds a step; a prompt is split over steps where chunking is on, and where it could
never fit one step otherwise. Who yields when blocks run out, whose prefix is cached and who is
admitted is the allocator's answer.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Self

from msgspec import Struct

from megallm.core_async.config import EngineConfig
from megallm.core_async.messages import Admission, Row
from megallm.core_async.plan.request import Request

MAX_PASSES = 64
"""Smaller requests that may overtake one that does not fit; then nobody does until it runs."""

LOOK_AHEAD = 8
"""Tokens; a row holds at most one block more than it needs."""


class Limits(Struct, frozen=True):
    """The bounds of one step."""

    max_tokens: int
    """Tokens computed in one step, at least max_requests."""
    max_requests: int
    """Rows of the batch."""
    block_size: int
    chunks_prompts: bool
    """Whether a prompt may be split although it would fit a step of its own."""
    shares_prefixes: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Gives those of an engine."""
        return cls(
            max_tokens=config.max_tokens,
            max_requests=config.max_requests,
            block_size=config.block_size,
            chunks_prompts=config.chunks_prompts,
            shares_prefixes=config.shares_prefixes,
        )


class Choice(Struct):
    """What one step computes, in batch order."""

    decodes: list[Request]
    """Running requests that compute the one token they sampled last."""
    chunks: list[tuple[Request, int]]
    """Requests with more than that to compute, and how many tokens of it; those admitted are the last."""
    budget: int
    """Tokens left for admissions."""
    admitted: list[Request]
    """Requests that run from this step on."""


def choose(running: Iterable[Request], limits: Limits) -> Choice:
    """Picks the next tokens of the running requests, which are in order of precedence; changes nothing."""
    decodes: list[Request] = []
    begun: list[Request] = []
    for request in running:
        if not request.is_decoding:
            begun.append(request)
        elif request.num_tokens < request.max_tokens:
            decodes.append(request)
    budget = limits.max_tokens - len(decodes)
    chunks: list[tuple[Request, int]] = []
    for request in begun:
        if budget <= 0:
            break
        length = min(request.num_missing, budget)
        if length:
            chunks.append((request, length))
            budget -= length
    return Choice(decodes, chunks, budget, [])


def candidates(
    waiting: Iterable[Request], rows: list[Row], limits: Limits, most: int
) -> list[tuple[Request, Admission]]:
    """Gives who might be admitted, in order: one for each of `rows` and `most` at the most.

    A request whose last tokens are still on the device ends the list: it waits for them.
    """
    offered: list[tuple[Request, Admission]] = []
    for request, row in zip(islice(waiting, most), rows, strict=False):
        if request.num_unknown:
            break
        may_split = limits.chunks_prompts or request.num_tokens > limits.max_tokens
        admission = request.admission(row, limits.block_size, may_split=may_split, max_passes=MAX_PASSES)
        offered.append((request, admission))
    return offered


def look_ahead(choice: Choice, num_running: int, num_free: int, limits: Limits) -> int:
    """Gives how many tokens before its blocks are full a row gets the next one, once any has to ask.

    Some row is full at almost every step; asking for those that soon will be saves the next asks.
    """
    is_ample = num_free >= 2 * num_running + len(choice.decodes)
    return min(LOOK_AHEAD, limits.block_size - 1) if is_ample else 0
