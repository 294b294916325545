"""Which tokens of which requests run next. Pure; knows no block ids, no loop, no tensor.

Decodes go first, then prompts already begun, then admissions in the order they came. The token
budget bounds a step; a prompt is split over steps where chunking is on, and where it could never
fit one step otherwise. Who yields when blocks run out is the allocator's answer.
"""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from megallm.core_async.plan.request import Request


class Limits(Struct, frozen=True):
    """The bounds of one step."""

    max_tokens: int
    """Tokens computed in one step, at least max_requests."""
    max_requests: int
    """Rows of the batch."""
    block_size: int
    chunks_prompts: bool
    """Whether a prompt may be split although it would fit a step of its own."""


class Choice(Struct):
    """What one step would compute, in batch order, blocks permitting."""

    decodes: list[Request]
    """Running requests that compute the one token they sampled last."""
    chunks: list[tuple[Request, int]]
    """Running requests with more than that to compute, and how many tokens of it."""
    admissions: list[tuple[Request, int]]
    """Waiting requests, from the head of the queue on, and how many of their tokens."""
    admitted: list[Request]
    """Those of them that the scheduler gave a row; their chunks are the last of `chunks`."""


def choose(running: Iterable[Request], waiting: deque[Request], limits: Limits) -> Choice:
    """Picks the next step's tokens within the budget; changes nothing.

    `running` is in order of admission. `waiting` is first come first served and holds no finished
    request.
    """
    decodes: list[Request] = []
    begun: list[Request] = []
    num_running = 0
    for request in running:
        num_running += 1
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
    admissions: list[tuple[Request, int]] = []
    for request in waiting:
        if budget <= 0 or num_running + len(admissions) >= limits.max_requests or request.num_unknown:
            break
        length = _first_chunk(request.num_missing, budget, limits)
        if not length:
            break
        admissions.append((request, length))
        budget -= length
    return Choice(decodes, chunks, admissions, [])


def _first_chunk(num_missing: int, budget: int, limits: Limits) -> int:
    """Gives how many of a new request's tokens fit the budget; 0 when it is to wait whole."""
    if num_missing <= budget:
        return num_missing
    return budget if limits.chunks_prompts or num_missing > limits.max_tokens else 0
