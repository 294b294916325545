"""The torch backend against attention by definition, with NaN wherever nothing was written."""

from dataclasses import replace

import pytest
import torch

from megallm.core_async.device import attention_sdpa
from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_sdpa import SdpaAttention
from tests.device.batches import Case, attended

GROUPED = LayerShape(num_heads=6, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3)
DECODE_AND_CHUNKS = [(30, 1), (2, 1), (0, 1), (9, 1), (0, 7), (5, 6), (3, 1), (8, 8)]
SHAPES = {
    "grouped heads": GROUPED,
    "one kv head per head": LayerShape(4, 4, 8, 8, 0.3),
    "one kv head": LayerShape(4, 1, 8, 8, 0.3),
    "narrow values": LayerShape(4, 4, 8, 5, 0.3),
    "window": LayerShape(6, 2, 8, 8, 0.3, window=4),
    "window of one token": LayerShape(6, 2, 8, 8, 0.3, window=0),
    "sinks": LayerShape(6, 2, 8, 8, 0.3, has_sinks=True),
    "sinks and window": LayerShape(6, 2, 8, 8, 0.3, window=3, has_sinks=True),
    "softcap": LayerShape(6, 2, 8, 8, 0.3, softcap=0.7),
    "softcap and window": LayerShape(6, 2, 8, 8, 0.3, window=4, softcap=0.7),
    "turned": LayerShape(6, 2, 8, 8, 0.3, uses_rope=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_rows_attend_by_definition(name: str, block_size: int) -> None:
    """Decode rows, whole prompts and chunks with context before them, in one packed step."""
    case = Case(DECODE_AND_CHUNKS, SHAPES[name], num_decode=4, block_size=block_size, rotary_dim=8)
    got, expected = attended(SdpaAttention(block_size), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_part_of_the_head_turns_in_either_layout(is_interleaved: bool) -> None:  # noqa: FBT001
    """rotary_percent below 1 leaves dimensions alone."""
    case = Case(
        DECODE_AND_CHUNKS,
        SHAPES["turned"],
        num_decode=4,
        rotary_dim=4,
        is_rope_interleaved=is_interleaved,
    )
    got, expected = attended(SdpaAttention(4), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_decode_rows_of_very_different_lengths_are_gathered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row must not pad a hundred short ones to its length; a bound on the copy splits groups too."""
    case = Case([(length, 1) for length in (3, 60, 1, 0, 61, 2, 30)], GROUPED, num_decode=7)
    for bound in (1 << 17, 64):
        monkeypatch.setattr(attention_sdpa, "MAX_GATHERED_TOKENS", bound)
        got, expected = attended(SdpaAttention(4), case)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_is_as_near_as_its_digits() -> None:
    """The cache and the products are in the model's dtype."""
    case = replace(Case(DECODE_AND_CHUNKS, GROUPED, num_decode=4), dtype=torch.bfloat16)
    got, expected = attended(SdpaAttention(4), case)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.03)


def test_runs_every_kind_of_layer() -> None:
    """The reference refuses nothing, so that auto always finds a backend."""
    assert [SdpaAttention(4).refusal(shape) for shape in SHAPES.values()] == [None] * len(SHAPES)
