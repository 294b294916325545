"""Sampling: exact supports, right frequencies, and tokens that depend on nothing but their own row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megallm.core_async.device import sampler
from megallm.core_async.device.rows import SamplingColumns
from megallm.core_async.device.sampler import processed, sample, uniforms
from megallm.core_async.messages import Sampling


def columns(*numbers: Sampling) -> SamplingColumns:
    """Gives the columns of some rows' sampling numbers."""
    return SamplingColumns(
        temperature=np.array([row.temperature for row in numbers], dtype=np.float32),
        top_k=np.array([row.top_k for row in numbers], dtype=np.int32),
        top_p=np.array([row.top_p for row in numbers], dtype=np.float32),
        min_p=np.array([row.min_p for row in numbers], dtype=np.float32),
        seed=np.array([row.seed for row in numbers], dtype=np.uint64),
        wants_log_probs=np.array([row.wants_log_probs for row in numbers], dtype=np.bool_),
        num_top=np.array([row.num_top for row in numbers], dtype=np.int32),
    )


def draws(logits: Tensor, numbers: Sampling, count: int) -> Tensor:
    """Draws `count` tokens from one row of logits, at as many positions."""
    rows = sample(logits.expand(count, -1), columns(*[numbers] * count), np.arange(count, dtype=np.int32))
    return rows.tokens


def logits_of(probabilities: list[float]) -> Tensor:
    """Gives one row whose softmax is `probabilities`."""
    return torch.tensor([probabilities]).log()


def assert_frequencies(tokens: Tensor, probabilities: Tensor) -> None:
    """Checks Pearson's statistic against its 99.99 % quantile; tokens expected 10 times at most are one."""
    observed = tokens.bincount(minlength=len(probabilities)).double()
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities.double() * len(tokens)
    is_rare = expected < 10
    observed = torch.cat((observed[~is_rare], observed[is_rare].sum()[None]))
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None])).clamp(min=1e-9)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty's approximation of the quantile: 3.72 deviations of the normal distribution
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound, (statistic, bound)


def test_greedy_takes_the_largest_logit() -> None:
    """Temperature 0 and top-k 1 are the same promise."""
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    numbers = [Sampling(temperature=0.0), Sampling(temperature=2.0, top_k=1, seed=9)] * 3
    assert (
        sample(logits, columns(*numbers), np.zeros(6, dtype=np.int32)).tokens.tolist()
        == logits.argmax(-1).tolist()
    )


def test_greedy_rows_do_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of the vocabulary costs more than the whole step of a small model."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    monkeypatch.setattr(torch.Tensor, "topk", refuse)
    logits = torch.randn(2, 300)
    sample(logits, columns(Sampling(temperature=0.0), Sampling(temperature=0.0)), np.zeros(2, dtype=np.int32))
    sample(logits, columns(Sampling(), Sampling(min_p=0.1, temperature=0.5)), np.zeros(2, dtype=np.int32))


@pytest.mark.parametrize("vocab", [2, 40, 127, 128, 129, 300])
def test_frequencies_are_those_of_the_softmax(vocab: int) -> None:
    """A draw that is a little off would bend every sampled text; sizes round a segment show its edges."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    for temperature in (0.5, 1.0, 2.0):
        tokens = draws(logits, Sampling(temperature=temperature, seed=vocab), 40_000)
        assert_frequencies(tokens, (logits[0] / temperature).softmax(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    """Masked logits, as of a grammar, are minus infinity."""
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [3, 127, 128, 399]] = torch.tensor([0.0, 1.0, 0.5, -2.0])
    assert_frequencies(draws(logits, Sampling(seed=1), 20_000), logits[0].softmax(-1))


def test_top_k_keeps_exactly_the_best_k() -> None:
    """One token too many is a token the caller ruled out."""
    probabilities = torch.tensor([0.05, 0.3, 0.1, 0.25, 0.2, 0.1001])
    tokens = draws(probabilities.log()[None], Sampling(top_k=3, seed=2), 20_000)
    kept = torch.tensor([0, 0.3, 0, 0.25, 0.2, 0])
    assert_frequencies(tokens, kept / kept.sum())


def test_top_k_of_the_vocabulary_or_more_is_off() -> None:
    """A large k is common in scripts and must not be an error."""
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(3))
    for top_k in (10, 1000):
        assert_frequencies(draws(logits, Sampling(top_k=top_k, seed=3), 20_000), logits[0].softmax(-1))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.2, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (0.9999, 5), (1.0, 5)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: int) -> None:
    """The token that crosses the line belongs to the nucleus; the next does not."""
    probabilities = torch.tensor([0.1, 0.4, 0.15, 0.05, 0.3])
    order = probabilities.argsort(descending=True)[:kept]
    expected = torch.zeros(5)
    expected[order] = probabilities[order]
    tokens = draws(probabilities.log()[None], Sampling(top_p=top_p, seed=4), 20_000)
    assert sorted(tokens.unique().tolist()) == sorted(order.tolist())
    if kept > 1:
        assert_frequencies(tokens, expected / expected.sum())


def test_top_k_comes_before_top_p_which_counts_the_rest_anew() -> None:
    """0.4 and 0.3 are 57 and 43 % of the best two: a nucleus of 0.5 is then one token, not two."""
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    assert draws(logits, Sampling(top_k=2, top_p=0.5, seed=5), 2_000).unique().tolist() == [0]
    assert draws(logits, Sampling(top_k=2, top_p=0.6, seed=5), 2_000).unique().tolist() == [0, 1]
    assert draws(logits, Sampling(top_p=0.5, seed=5), 2_000).unique().tolist() == [0, 1]


def test_min_p_is_relative_to_the_best_token() -> None:
    """min_p 0.5 keeps what is at least half as likely as the best."""
    logits = logits_of([0.4, 0.21, 0.19, 0.2])
    assert draws(logits, Sampling(min_p=0.51, seed=6), 2_000).unique().tolist() == [0, 1]
    assert draws(logits, Sampling(min_p=0.49, seed=6), 4_000).unique().tolist() == [0, 1, 3]


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_nucleus_of_a_large_vocabulary_is_the_same_with_and_without_the_short_cut(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the first tokens are sorted alone where they are enough."""
    logits = torch.randn(3, 5_000, generator=torch.Generator().manual_seed(11))
    numbers = columns(*[Sampling(top_p=top_p, seed=seed, temperature=0.8) for seed in range(3)])
    positions = np.arange(3, dtype=np.int32)
    short = sample(logits, numbers, positions).tokens
    monkeypatch.setattr(sampler, "_NUCLEUS_PREFIX", 5_000)
    assert sample(logits, numbers, positions).tokens.tolist() == short.tolist()


@given(st.data())
def test_row_gives_the_same_token_whatever_stands_beside_it(data: st.DataObject) -> None:
    """A seeded request must repeat, and what else the server runs is never the same twice."""
    numbers = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 3, 50, 400]),
        top_p=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**63 - 1),
    )
    rows = data.draw(st.lists(numbers, min_size=2, max_size=6))
    positions = np.array(
        data.draw(st.lists(st.integers(0, 10**6), min_size=len(rows), max_size=len(rows))), np.int32
    )
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(len(rows)))
    together = sample(logits, columns(*rows), positions).tokens.tolist()
    alone = [
        sample(logits[place : place + 1], columns(row), positions[place : place + 1]).tokens.item()
        for place, row in enumerate(rows)
    ]
    assert together == alone


def test_seed_and_position_alone_fix_the_number() -> None:
    """Known values: the stream must never change between releases, or seeded texts would."""
    seeds = np.array([0, 0, 1, 2**63 - 1], dtype=np.uint64)
    numbers = uniforms(seeds, np.array([0, 1, 0, 77], dtype=np.int32))
    again = uniforms(seeds[::-1].copy(), np.array([77, 0, 1, 0], dtype=np.int32))
    assert numbers.tolist() == again[::-1].tolist()
    assert numbers.tolist() == [
        _reference_uniform(int(s), p) for s, p in zip(seeds, [0, 1, 0, 77], strict=True)
    ]


def _reference_uniform(seed: int, position: int) -> float:
    """SplitMix64 in Python's own integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    return (mix((mix((seed + gamma) & mask) + (position + 1) * gamma) & mask) >> 11) * 2.0**-53


def test_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    """Users choose seeds 0, 1, 2, ..: neighbours must not be alike."""
    along_positions = uniforms(np.full(50_000, 7, dtype=np.uint64), np.arange(50_000, dtype=np.int32))
    along_seeds = uniforms(np.arange(50_000, dtype=np.uint64), np.full(50_000, 7, dtype=np.int32))
    for numbers in (along_positions, along_seeds):
        assert 0 <= numbers.min() < numbers.max() < 1
        tokens = torch.from_numpy((numbers * 40).astype(np.int64))
        assert_frequencies(tokens, torch.full((40,), 1 / 40))
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_processed_logits_are_those_that_tokens_are_drawn_from() -> None:
    """Users who train on them need the distribution that was sampled, cuts included."""
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    numbers = columns(Sampling(top_k=2), Sampling(temperature=2.0), Sampling(temperature=0.0, top_k=1))
    probabilities = processed(logits.expand(3, -1), numbers).softmax(-1)
    torch.testing.assert_close(probabilities[0], torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(probabilities[1], (logits[0] / 2).softmax(-1))
    torch.testing.assert_close(probabilities[2], logits[0].softmax(-1))
    whole = processed(logits.expand(2, -1), columns(Sampling(), Sampling(temperature=0.0)))
    torch.testing.assert_close(whole.softmax(-1), logits.softmax(-1).expand(2, -1))


@pytest.mark.parametrize(
    "numbers", [Sampling(temperature=0), Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_rows_without_a_finite_best_are_flagged_and_spare_the_others(
    numbers: Sampling, poison: float
) -> None:
    """The step's other rows are fine, and whoever reads the result must know which one is not."""
    logits = torch.zeros(3, 200)
    logits[1, 7] = poison
    logits[2] = -torch.inf
    sampled = sample(logits, columns(numbers, numbers, numbers), np.zeros(3, dtype=np.int32))
    assert sampled.is_finite.tolist() == [True, False, False]
    assert all(0 <= token < 200 for token in sampled.tokens.tolist())


def test_bfloat16_logits_are_drawn_from_in_float32() -> None:
    """A running sum in bfloat16 stands still after 256 equal terms."""
    logits = torch.zeros(1, 1_000, dtype=torch.bfloat16)
    tokens = draws(logits, Sampling(seed=8), 10_000)
    assert_frequencies(tokens // 25, torch.full((40,), 1 / 40))
