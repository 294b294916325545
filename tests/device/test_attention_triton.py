"""The Triton backend against attention by definition, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_triton import TritonAttention
from tests.device.batches import Case, attended
from tests.device.test_attention_sdpa import SHAPES

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

ROWS = [(20, 1), (0, 1), (0, 5), (5, 6)]


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_rows_attend_by_definition(name: str) -> None:
    """Decode rows, whole prompts and chunks with context before them, in one packed step."""
    case = Case(ROWS, SHAPES[name], num_decode=2, block_size=4, rotary_dim=8)
    got, expected = attended(TritonAttention(), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_part_of_the_head_turns_in_either_layout(is_interleaved: bool) -> None:  # noqa: FBT001
    """rotary_percent below 1 leaves dimensions alone."""
    case = Case(ROWS, SHAPES["turned"], num_decode=2, rotary_dim=4, is_rope_interleaved=is_interleaved)
    got, expected = attended(TritonAttention(), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_heads_too_wide_for_the_kernels_are_refused() -> None:
    """A kernel that does not fit the card's memory fails in the middle of a run."""
    assert TritonAttention().refusal(LayerShape(4, 4, 256, 256, 1.0)) is None
    assert "320 dimensions" in str(TritonAttention().refusal(LayerShape(4, 4, 320, 128, 1.0)))
