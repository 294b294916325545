"""What normalises each row of logits, in one read, in an order of summing that the row alone decides.

Kernels in Triton. Knows logits. Import it only where it runs.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# (what a kernel's parameters are is Triton's own matter)

import torch
import triton
import triton.language as tl
from torch import Tensor

from megallm.core_async.device.triton_compile import launch

CHUNK = 4096
"""Logits that a program looks at a time."""


def normalisers(logits: Tensor) -> Tensor:
    """Gives `[rows, 2]`, float32: each row's largest logit, and the log of the sum of exp(logit - it)."""
    count, vocab = logits.shape
    out = torch.empty((count, 2), dtype=torch.float32, device=logits.device)
    if count:
        launch(_normalise, (count,), logits, out, logits.stride(0), vocab, CHUNK=CHUNK, num_warps=8)
    return out


@triton.jit
def _normalise(logits, out, logits_row, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, CHUNK)
    best = tl.full((CHUNK,), -1.0e30, tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, vocab, CHUNK):
        is_logit = first + places < vocab
        some = tl.load(logits + row * logits_row + first + places, mask=is_logit, other=-float("inf"))
        some = some.to(tl.float32)
        new_best = tl.maximum(best, some)
        total = total * tl.exp(best - new_best) + tl.where(is_logit, tl.exp(some - new_best), 0.0)
        best = new_best
    largest = tl.max(best, 0)
    total = tl.sum(total * tl.exp(best - largest), 0)
    tl.store(out + row * 2, largest)
    tl.store(out + row * 2 + 1, tl.log(total))
