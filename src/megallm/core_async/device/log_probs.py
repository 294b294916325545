"""Log-probabilities of chosen tokens, and the likeliest tokens beside them. Knows logits alone."""

import torch
from msgspec import Struct
from torch import Tensor


class LogProbs(Struct, frozen=True, eq=False):
    """Of some places, on the logits' device."""

    chosen: Tensor
    """`[places]`, float32."""
    top_ids: Tensor
    """`[places, num_top]`, the likeliest first."""
    top: Tensor
    """`[places, num_top]`, float32."""


def log_probs_of(logits: Tensor, tokens: Tensor, *, num_top: int) -> LogProbs:
    """Gives the log-probs of one token a row of `[places, vocab]`: the log of the float32 softmax."""
    normalised = logits.float().log_softmax(-1)
    top = normalised.topk(num_top, dim=-1)
    return LogProbs(chosen=normalised.gather(1, tokens[:, None])[:, 0], top_ids=top.indices, top=top.values)


def joined(parts: list[LogProbs]) -> LogProbs:
    """Gives several parts as one, in order."""
    return LogProbs(
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top=torch.cat([part.top for part in parts]),
    )
