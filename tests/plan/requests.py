"""Requests as a test of the plan writes them."""

from collections.abc import Sequence

from megallm.core_async.messages import NewRequest, RequestId, Row, Sampling, TextSpec, pack_ints
from megallm.core_async.plan.request import Request


def request_of(
    request_id: int,
    prompt: Sequence[int] = (7, 8, 9),
    num_new: int = 4,
    *,
    priority: int = 0,
    row: int | None = None,
    scores: bool = False,
    sampling: Sampling | None = None,
) -> Request:
    """Gives a request, with nothing computed; with `row` it runs."""
    new = NewRequest(
        request_id=RequestId(request_id),
        prompt=pack_ints(list(prompt)),
        max_new_tokens=num_new,
        stop_token_ids=(),
        sampling=sampling or Sampling(),
        text=TextSpec(RequestId(request_id)),
        priority=priority,
        scores_prompt=scores,
    )
    request = Request(new)
    if row is not None:
        request.take_row(Row(row), 1, None)
    return request


def decoding(
    request_id: int, prompt: Sequence[int], tokens: Sequence[int], *, row: int, num_new: int = 4
) -> Request:
    """Gives one that has sampled some tokens, all known, and computes the last of them next."""
    request = request_of(request_id, prompt, num_new, row=row)
    request.tokens.extend(tokens)
    request.num_tokens += len(tokens)
    request.num_computed = request.num_tokens - 1
    request.is_decoding = request.has_started = True
    return request
