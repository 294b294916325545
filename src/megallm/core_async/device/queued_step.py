"""A launched step: its results on their way from the device, and the message they become."""

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from megallm.core_async.device.log_probs import LogProbs
from megallm.core_async.device.rows import IntColumn
from megallm.core_async.device.sampler import Sampled
from megallm.core_async.messages import Floats, Ints, StepResult, TopLogProbs

NOT_FINITE = "its logits have no finite best value; look for NaN or infinity in the model's weights"


class StepTensors(Struct, frozen=True, eq=False):
    """What a step gave, on the device unless it says otherwise; None where nothing was asked for."""

    sampled: Sampled | None = None
    told: Tensor | None = None
    """Instead of `sampled`: `[rows]`, int32, in host memory that the step itself writes, a token each, or the
    complement of one whose logit is not finite."""
    log_probs: LogProbs | None = None
    """Of the sampled tokens."""
    scores: LogProbs | None = None
    """Of the plan's targets."""
    failed: list[tuple[int, str]] = []
    """See messages.StepResult."""


class StepTimes(Struct, frozen=True):
    """Host seconds that the parts of a step took."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class QueuedStep:
    """`protocols.PendingStep`: copies to the host are queued behind a step that does not tell its tokens."""

    def __init__(
        self,
        step: int,
        tensors: StepTensors,
        times: StepTimes,
        *,
        is_captured: bool = False,
        arrived: torch.cuda.Event | None = None,
    ) -> None:
        """`is_captured`: it was replayed from a captured graph. `arrived`: when `tensors.told` is there."""
        self._step = step
        self._is_captured = is_captured
        self._times = times
        self._failed = tensors.failed
        self._tokens = self._is_finite = None
        self._told = tensors.told
        device: torch.device | None = None
        if tensors.sampled is not None:
            device = tensors.sampled.tokens.device
            self._tokens = _on_host(tensors.sampled.tokens.int())
            self._is_finite = _on_host(tensors.sampled.is_finite)
        self._log_probs = None if tensors.log_probs is None else _logs_on_host(tensors.log_probs)
        self._scores = None if tensors.scores is None else _logs_on_host(tensors.scores)
        if tensors.scores is not None:
            device = tensors.scores.chosen.device
        self._arrived = arrived
        if device is not None and device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> StepResult:
        """Waits until the step has run; see `protocols.PendingStep.result`.

        A row whose logits have no finite best value has failed: its token means nothing.
        Raises: what the device raises late.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, is_finite = self._sampled()
        return StepResult(
            step=self._step,
            tokens=Ints(tokens.tobytes()),
            log_probs=_chosen(self._log_probs),
            top=_top(self._log_probs),
            failed=self._with_broken(is_finite),
            scores=_chosen(self._scores),
            score_top=_top(self._scores),
            prepare_s=self._times.prepare_s,
            forward_s=self._times.forward_s,
            sample_s=self._times.sample_s,
            is_captured=self._is_captured,
        )

    def _sampled(self) -> tuple[IntColumn, NDArray[np.bool_]]:
        """Gives the tokens that arrived, and which of them are finite; none where none were sampled."""
        if self._told is not None:
            told = self._told.numpy()
            return np.maximum(told, ~told), told >= 0
        if self._tokens is None or self._is_finite is None:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
        return self._tokens.numpy(), self._is_finite.numpy()

    def _with_broken(self, is_finite: NDArray[np.bool_]) -> list[tuple[int, str]]:
        """Gives the rows that failed, with those whose logits are broken."""
        if is_finite.all():
            return self._failed
        broken = dict.fromkeys(np.flatnonzero(~is_finite).tolist(), NOT_FINITE)
        return sorted({**broken, **dict(self._failed)}.items())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


def _logs_on_host(log_probs: LogProbs) -> LogProbs:
    return LogProbs(
        chosen=_on_host(log_probs.chosen),
        top_ids=_on_host(log_probs.top_ids.int()),
        top=_on_host(log_probs.top),
    )


def _chosen(log_probs: LogProbs | None) -> Floats:
    return Floats(b"" if log_probs is None else log_probs.chosen.numpy().tobytes())


def _top(log_probs: LogProbs | None) -> TopLogProbs | None:
    if log_probs is None or not log_probs.top.shape[1]:
        return None
    return TopLogProbs(
        num_top=log_probs.top.shape[1],
        ids=Ints(log_probs.top_ids.numpy().tobytes()),
        log_probs=Floats(log_probs.top.numpy().tobytes()),
    )
