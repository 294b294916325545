"""What normalises a row of logits, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device import log_probs, triton_log_probs
from megallm.core_async.device.triton_log_probs import normalisers

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_rows_are_normalised_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is not full, and its largest logit may be in any."""
    monkeypatch.setattr(triton_log_probs, "CHUNK", 32)
    logits = torch.randn(5, 99) * 9
    logits[2, 3] = -torch.inf
    by = normalisers(logits)
    torch.testing.assert_close(by[:, 0], logits.amax(-1))
    torch.testing.assert_close(by.sum(-1), logits.logsumexp(-1))


def test_there_may_be_no_row() -> None:
    """A step may sample nothing."""
    assert normalisers(torch.zeros(0, 9)).shape == (0, 2)


@pytest.mark.gpu
def test_row_is_the_same_to_the_bit_at_any_address() -> None:
    """Rows of an odd vocabulary begin anywhere."""
    logits = torch.randn(64, 50_001, device="cuda", dtype=torch.bfloat16)
    tokens = torch.arange(64, device="cuda")
    together = log_probs.log_probs_of(logits, tokens, num_top=3)
    torch.testing.assert_close(
        together.chosen, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5
    )
    for row in range(0, 64, 7):
        alone = log_probs.log_probs_of(logits[row : row + 1].clone(), tokens[row : row + 1], num_top=3)
        assert alone.chosen.equal(together.chosen[row : row + 1])
        assert alone.top.equal(together.top[row : row + 1])
