"""The batch-invariant backend against attention by definition, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device import triton_invariant_attention
from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_invariant import InvariantAttention
from tests.device.batches import Case, attended
from tests.device.test_attention_sdpa import SHAPES

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning",
    "ignore:overflow encountered in exp2:RuntimeWarning",
)

ROWS = [(20, 1), (0, 1), (0, 5), (5, 6)]
DECODES = [(70, 1), (0, 1), (30, 1)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts short rows into several parts."""
    monkeypatch.setattr(triton_invariant_attention, "TOKENS", 16)
    monkeypatch.setattr(triton_invariant_attention, "PART", 32)
    monkeypatch.setattr(triton_invariant_attention, "LINES", 32)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("parts", [ROWS, DECODES])
def test_rows_attend_by_definition(name: str, parts: list[tuple[int, int]]) -> None:
    """Prompts and chunks in one program each, decode rows whose parts are shared out."""
    case = Case(parts, SHAPES[name], num_decode=2 if parts is ROWS else 3, block_size=4, rotary_dim=8)
    got, expected = attended(InvariantAttention(), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_heads_too_wide_for_the_kernel_are_refused() -> None:
    """A kernel that does not fit the card's memory fails in the middle of a run."""
    assert InvariantAttention().refusal(LayerShape(4, 4, 256, 256, 1.0)) is None
    assert "320 dimensions" in str(InvariantAttention().refusal(LayerShape(4, 4, 320, 128, 1.0)))
