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
    """Gives the log-probs of one token a row of `[places, vocab]`: the log of the float32 softmax.

    A row's are the same to the bit whatever rows there are beside it.
    """
    if logits.device.type == "cuda":
        # torch sums a row in another order where it begins at another address
        from megallm.core_async.device.triton_log_probs import normalisers  # noqa: PLC0415 - where CUDA is

        return _normalised(logits, tokens, normalisers(logits), num_top=num_top)
    normalised = logits.float().log_softmax(-1)
    top = normalised.topk(num_top, dim=-1)
    return LogProbs(chosen=normalised.gather(1, tokens[:, None])[:, 0], top_ids=top.indices, top=top.values)


def _normalised(logits: Tensor, tokens: Tensor, by: Tensor, *, num_top: int) -> LogProbs:
    top = logits.topk(num_top, dim=-1)
    chosen = logits.gather(1, tokens[:, None]).float()
    return LogProbs(
        chosen=(chosen - by[:, :1] - by[:, 1:])[:, 0],
        top_ids=top.indices,
        top=top.values.float() - by[:, :1] - by[:, 1:],
    )


def joined(parts: list[LogProbs]) -> LogProbs:
    """Gives several parts as one, in order."""
    return LogProbs(
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top=torch.cat([part.top for part in parts]),
    )
