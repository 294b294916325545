"""From logits to tokens: greedy, or drawn with temperature, top-k, top-p and min-p.

Knows logits and numbers; knows no request. A drawn token depends on its row's logits, numbers, seed and
position alone, never on the rows beside it. Nothing here waits for the device, on CUDA.

Candidates are cut by weight, not by rank: each limit becomes the smallest weight that stays, so tokens
with equal logits stay or go together and no order among them matters. One uniform number a row is then
inverted through the weights in order of token id (inverse transform sampling: Devroye, "Non-Uniform
Random Variate Generation", 1986, II.2).
"""

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from megallm.core_async.device.rows import IntColumn, SamplingColumns

_SEGMENT = 128
"""Tokens whose weights are summed before the running sum: the sum runs over segments, then inside one."""

_NUCLEUS_PREFIX = 1024
"""Tokens sorted first for a top-p row on a CPU; a nucleus that is larger costs a full sort."""


class Sampled(Struct, frozen=True, eq=False):
    """The chosen tokens of one step, on the logits' device."""

    tokens: Tensor
    """`[rows]`, int64."""
    is_finite: Tensor
    """`[rows]`, bool: False where the logits hold NaN, or nothing or infinity is the best of them."""


def sample(logits: Tensor, sampling: SamplingColumns, positions: IntColumn) -> Sampled:
    """Chooses one token a row from `[rows, vocab]`.

    `positions` are the places in their sequences that the tokens take.
    """
    is_greedy = sampling.is_greedy
    if is_greedy.all():
        tokens = _argmax(logits)
        best = logits.gather(1, tokens[:, None])[:, 0]
    else:
        best = logits.amax(-1)
        tokens = _drawn(logits, best, is_greedy, sampling, positions)
    return Sampled(tokens=tokens, is_finite=best.isfinite())


def processed(logits: Tensor, sampling: SamplingColumns) -> Tensor:
    """Gives the float32 logits that tokens are drawn from: over the temperature, minus infinity where cut.

    Rows of temperature 0 stay as they are, since their tokens are not drawn.
    """
    is_drawn = sampling.temperature > 0
    temperature = np.where(is_drawn, sampling.temperature, np.float32(1))
    scaled = (logits.float() - logits.amax(-1, keepdim=True).float()).div_(
        _column(temperature, logits.device)
    )
    weights = scaled.exp()
    cutoffs = _cutoffs(weights, sampling)
    if cutoffs is None:
        return scaled
    is_cut = (weights < cutoffs[:, None]) & _column(is_drawn, logits.device)
    return scaled.masked_fill_(is_cut, -torch.inf)


def uniforms(seeds: NDArray[np.uint64], positions: IntColumn) -> NDArray[np.float64]:
    """Gives one number of [0, 1) per (seed, position), the same on every machine.

    The SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), at place `position` of the sequence that the mixed seed starts: any place costs the same.
    """
    golden_gamma = np.uint64(0x9E3779B97F4A7C15)
    places = positions.astype(np.uint64) + np.uint64(1)
    mixed = _mixed(_mixed(seeds + golden_gamma) + places * golden_gamma)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _argmax(logits: Tensor) -> Tensor:
    """Gives each row's best token; of equals the first, and NaN is better than anything."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        # the same answer as torch's in a tenth of the time
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _drawn(
    logits: Tensor,
    best: Tensor,
    is_greedy: NDArray[np.bool_],
    sampling: SamplingColumns,
    positions: IntColumn,
) -> Tensor:
    """Draws the rows that are not greedy; gives all rows' tokens."""
    device = logits.device
    if not is_greedy.any():
        return _draw(logits, best, sampling, uniforms(sampling.seed, positions))
    drawn_rows = np.flatnonzero(~is_greedy)
    rows = torch.from_numpy(drawn_rows).to(device, non_blocking=True)
    greedy_rows = torch.from_numpy(np.flatnonzero(is_greedy)).to(device, non_blocking=True)
    drawn = _draw(
        logits.index_select(0, rows),
        best.index_select(0, rows),
        sampling.take(drawn_rows),
        uniforms(sampling.seed[drawn_rows], positions[drawn_rows]),
    )
    tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
    tokens.index_copy_(0, rows, drawn)
    return tokens.index_copy_(0, greedy_rows, _argmax(logits.index_select(0, greedy_rows)))


def _draw(logits: Tensor, best: Tensor, sampling: SamplingColumns, numbers: NDArray[np.float64]) -> Tensor:
    """Draws one token a row; `best` is each row's largest logit."""
    device = logits.device
    # the best token of a row weighs 1, whatever the temperature
    weights = (logits.float() - best.float()[:, None]).div_(_column(sampling.temperature, device)).exp_()
    cutoffs = _cutoffs(weights, sampling)
    if cutoffs is not None:
        weights.masked_fill_(weights < cutoffs[:, None], 0)
    vocab = weights.shape[1]
    if vocab % _SEGMENT:
        weights = functional.pad(weights, (0, _SEGMENT - vocab % _SEGMENT))
    segments = weights.view(len(weights), -1, _SEGMENT)
    by_segment = segments.sum(-1).double()
    target = torch.from_numpy(numbers).to(device, non_blocking=True) * by_segment.sum(-1)
    segment, rest = _inverted(by_segment, target)
    inside = segments.gather(1, segment[:, None, None].expand(-1, 1, _SEGMENT))[:, 0].double()
    return (segment * _SEGMENT + _inverted(inside, rest)[0]).clamp_(max=vocab - 1)


def _column(values: NDArray[np.float32] | NDArray[np.bool_], device: torch.device) -> Tensor:
    """Gives `[rows, 1]` on the device."""
    return torch.from_numpy(values).to(device, non_blocking=True)[:, None]


def _inverted(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Finds in each row the first place where the running sum exceeds `target`; and what is left there.

    The place has a weight above zero: a target that rounding puts past the sum counts as just below it.
    """
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    place = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[1] - 1)
    before = running.gather(1, (place - 1).clamp_(min=0)).masked_fill_(place == 0, 0)
    return place[:, 0], (target - before)[:, 0]


def _cutoffs(weights: Tensor, sampling: SamplingColumns) -> Tensor | None:
    """Gives the smallest weight that each row keeps; None when no row is limited."""
    vocab = weights.shape[1]
    has_top_k = (sampling.top_k > 0) & (sampling.top_k < vocab)
    has_top_p = (sampling.top_p > 0) & (sampling.top_p < 1)
    cutoffs = None
    if (sampling.min_p > 0).any():
        cutoffs = torch.from_numpy(sampling.min_p).to(weights.device, non_blocking=True)
    for rows, limit in (
        (np.flatnonzero(has_top_k), _top_k_cutoffs),
        (np.flatnonzero(has_top_p & ~has_top_k), _top_p_cutoffs),
    ):
        if not len(rows):
            continue
        if cutoffs is None:
            cutoffs = weights.new_zeros(len(weights))
        rows_t = torch.from_numpy(rows).to(weights.device, non_blocking=True)
        some = weights if len(rows) == len(weights) else weights.index_select(0, rows_t)
        found = limit(some, sampling.top_k[rows], np.where(has_top_p, sampling.top_p, np.float32(1))[rows])
        cutoffs = cutoffs.index_copy(0, rows_t, torch.maximum(cutoffs.index_select(0, rows_t), found))
    return cutoffs


def _top_k_cutoffs(weights: Tensor, top_k: IntColumn, top_p: NDArray[np.float32]) -> Tensor:
    """Gives the weight of the k-th token, or of the last of the nucleus among the best k."""
    device = weights.device
    last = torch.from_numpy(top_k).to(device, non_blocking=True).long()[:, None] - 1
    best = weights.topk(int(top_k.max()), dim=-1).values
    if (top_p < 1).any():
        running = best.cumsum(-1, dtype=torch.float64)
        wanted = torch.from_numpy(top_p).to(device, non_blocking=True)[:, None] * running.gather(1, last)
        last = torch.minimum(last, torch.searchsorted(running, wanted))
    return best.gather(1, last)[:, 0]


def _top_p_cutoffs(weights: Tensor, top_k: IntColumn, top_p: NDArray[np.float32]) -> Tensor:
    """Gives the weight of the last token of the nucleus (Holtzman et al., 2020, section 3.1)."""
    del top_k
    vocab = weights.shape[1]
    wanted = torch.from_numpy(top_p).to(weights.device, non_blocking=True) * weights.sum(
        -1, dtype=torch.float64
    )
    # asking whether the prefix was enough would wait for a GPU, where a full sort is cheap
    if weights.device.type == "cpu" and vocab > _NUCLEUS_PREFIX:
        best = weights.topk(_NUCLEUS_PREFIX, dim=-1).values
        running = best.cumsum(-1, dtype=torch.float64)
        if bool((running[:, -1] >= wanted).all()):
            return best.gather(1, torch.searchsorted(running, wanted[:, None]))[:, 0]
    best = weights.sort(dim=-1, descending=True).values
    running = best.cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(running, wanted[:, None]).clamp_(max=vocab - 1)
    return best.gather(1, last)[:, 0]
