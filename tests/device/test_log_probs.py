"""Log-probs of chosen tokens, and the likeliest beside them."""

import torch

from megallm.core_async.device.log_probs import joined, log_probs_of


def test_chosen_and_likeliest_come_from_one_softmax() -> None:
    """A chosen token that is the likeliest must show the same number in both."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    tokens = logits.argmax(-1)
    got = log_probs_of(logits, tokens, num_top=4)
    expected = logits.log_softmax(-1)
    assert got.top_ids[:, 0].equal(tokens)
    assert got.top[:, 0].equal(got.chosen)
    torch.testing.assert_close(got.top, expected.sort(-1, descending=True).values[:, :4])
    torch.testing.assert_close(got.chosen, expected.gather(1, tokens[:, None])[:, 0])


def test_bfloat16_logits_are_summed_in_float32() -> None:
    """The log of a sum over a vocabulary is wrong in the first digit in bfloat16."""
    logits = torch.zeros(1, 5_000, dtype=torch.bfloat16)
    got = log_probs_of(logits, torch.tensor([7]), num_top=0)
    torch.testing.assert_close(got.chosen, -torch.tensor([5_000.0]).log())
    assert got.top.shape == (1, 0)


def test_parts_are_joined_in_order() -> None:
    """A long prompt is scored in parts."""
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(5)
    whole = log_probs_of(logits, tokens, num_top=2)
    parts = joined(
        [log_probs_of(logits[:2], tokens[:2], num_top=2), log_probs_of(logits[2:], tokens[2:], num_top=2)]
    )
    assert parts.chosen.equal(whole.chosen)
    assert parts.top_ids.equal(whole.top_ids)
    assert parts.top.equal(whole.top)
