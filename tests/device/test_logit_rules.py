"""Penalties, biases and masks, against their definitions row by row."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megallm.core_async.device.logit_rules import LogitRules
from megallm.core_async.messages import Row, RowSetup, Sampling, pack_ints

VOCAB = 12


def rules(max_requests: int = 6) -> LogitRules:
    """Gives rules of rows that have none yet."""
    return LogitRules(max_requests=max_requests, vocab_size=VOCAB, device=torch.device("cpu"))


def column(*rows: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Gives an int32 column."""
    return np.array(rows, dtype=np.int32)


def by_definition(
    logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]
) -> list[float]:
    """Gives one row's logits with its penalties and biases."""
    changed = list(logits)
    for token in range(VOCAB):
        if token in prompt or token in output:
            factor = sampling.repetition_penalty
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        count = output.count(token)
        changed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    return changed


samplings = st.builds(
    Sampling,
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (5, -1.0))]),
)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@given(st.lists(st.tuples(samplings, token_lists, token_lists, token_lists), min_size=1, max_size=6))
def test_each_rows_logits_follow_its_own_rules(
    requests: list[tuple[Sampling, list[int], list[int], list[int]]],
) -> None:
    """Rows share the tables of counts, so one row's tokens must not count for another."""
    kept = rules()
    setups = [
        RowSetup(Row(row), sampling, num_prompt=len(prompt), known=pack_ints(prompt + output))
        for row, (sampling, prompt, output, _) in enumerate(requests)
    ]
    kept.set_up(setups)
    order = list(range(len(requests)))[::-1]
    later = max(len(sampled) for *_, sampled in requests)
    for step in range(later):
        stepping = [row for row in order if step < len(requests[row][3])]
        kept.observe(column(*stepping), torch.tensor([requests[row][3][step] for row in stepping]))
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(len(requests)))
    before = logits.clone()
    got = kept.adjusted(logits, column(*order), column(*[50] * len(order)))
    expected = [
        by_definition(logits[place].tolist(), sampling, prompt, output + sampled)
        for place, (sampling, prompt, output, sampled) in enumerate(requests[row] for row in order)
    ]
    torch.testing.assert_close(got, torch.tensor(expected))
    assert logits.equal(before), "the raw logits are still wanted for log-probs"


def test_rows_without_rules_cost_nothing() -> None:
    """The usual step must not copy the logits."""
    kept = rules()
    kept.set_up([RowSetup(Row(0), Sampling()), RowSetup(Row(1), Sampling(presence_penalty=1.0))])
    logits = torch.zeros(1, VOCAB)
    assert kept.adjusted(logits, column(0), column(4)) is logits
    assert kept.adjusted(logits, column(1), column(4)) is not logits


def test_masked_ids_are_impossible_until_their_position() -> None:
    """min_tokens holds exactly so long."""
    kept = rules()
    kept.set_up([RowSetup(Row(2), Sampling(logit_bias=((4, 100.0),)), masked_ids=(4, 7), masked_until=9)])
    early, late = (
        kept.adjusted(torch.zeros(1, VOCAB), column(2), column(position))[0] for position in (8, 9)
    )
    assert early.isneginf().nonzero()[:, 0].tolist() == [4, 7]
    assert late[4] == 100
    assert late[7] == 0


def test_next_request_of_a_row_starts_afresh() -> None:
    """A row passes from one request to the next, with every rule of the first forgotten."""
    kept = rules(max_requests=2)
    strict = Sampling(presence_penalty=1.0, logit_bias=((1, 5.0),))
    for _ in range(20):
        kept.set_up(
            [
                RowSetup(
                    Row(0), strict, num_prompt=1, known=pack_ints([3, 4]), masked_ids=(2,), masked_until=99
                )
            ]
        )
        adjusted = kept.adjusted(torch.zeros(1, VOCAB), column(0), column(5))[0]
        assert adjusted.nonzero()[:, 0].tolist() == [1, 2, 4]
        kept.observe(column(0), torch.tensor([6]))
    kept.set_up([RowSetup(Row(0), Sampling())])
    logits = torch.zeros(1, VOCAB)
    assert kept.adjusted(logits, column(0), column(5)) is logits


def test_many_rows_with_penalties_keep_their_counts_as_the_tables_grow() -> None:
    """Tables double when they are full."""
    kept = rules(max_requests=40)
    penalty = Sampling(frequency_penalty=1.0)
    for row in range(40):
        kept.set_up([RowSetup(Row(row), penalty, known=pack_ints([row % VOCAB] * (row + 1)))])
    got: Tensor = kept.adjusted(torch.zeros(40, VOCAB), column(*range(40)), column(*[60] * 40))
    for row in range(40):
        expected = torch.zeros(VOCAB)
        expected[row % VOCAB] = -(row + 1)
        assert got[row].equal(expected)
