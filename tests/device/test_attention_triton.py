"""The Triton backend against attention by definition, in Triton's interpreter."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from megallm.core_async.device import attention_triton, triton_decode
from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.attention_triton import TritonAttention
from tests.device.batches import Case, attended
from tests.device.paged_rows import PagedRows
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


@pytest.mark.parametrize("limit", [0, 1024])
@pytest.mark.parametrize("name", ["turned", "softcap and window", "sinks and window", "narrow values"])
def test_decode_rows_alone_attend_by_definition(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention may norm, turn and write by itself there; `test_triton_heads` has its other cases."""
    monkeypatch.setattr(attention_triton, "MAX_FUSED_ROWS", limit)
    case = Case([(20, 1), (0, 1), (67, 1)], SHAPES[name], num_decode=3, block_size=4, rotary_dim=8)
    got, expected = attended(TritonAttention(), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_many_decode_rows_have_a_kernel_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit, and in mixed steps, queries are turned in place; below it they are left as they came."""
    shape = SHAPES["turned"]
    for limit, is_left in ((3, True), (2, False)):
        monkeypatch.setattr(attention_triton, "MAX_FUSED_ROWS", limit)
        batch, layer, query = decode_step(PagedRows([3, 9, 7], shape))
        attention, came = TritonAttention(), query.clone()
        attention.begin_step(batch)
        attention.attend(layer, query, torch.randn(3, 2, 8), torch.randn(3, 2, 8))
        assert query.equal(came) == is_left


def test_attention_waits_for_the_list_that_was_made_just_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is in a step's first layer of a kind; ahead of the others is the product that gives queries."""
    waits: list[bool] = []
    attend = triton_decode.decode_attention

    def decode_attention(*args: Any, **options: Any) -> None:  # Any: passed on
        waits.append(options["is_just_listed"])
        attend(*args, **options)

    monkeypatch.setattr(triton_decode, "decode_attention", decode_attention)
    monkeypatch.setattr(attention_triton, "MAX_FUSED_ROWS", 1024)
    shape = SHAPES["turned"]
    attention = TritonAttention()
    batch, layer, query = decode_step(PagedRows([3], shape))
    key, value = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    windowed = msgspec.structs.replace(layer, shape=msgspec.structs.replace(shape, window=5))
    for _ in range(2):
        attention.begin_step(batch)
        for some in (layer, layer, windowed):
            attention.attend(some, query, key, value)
    assert waits == [True, False, True] * 2
    monkeypatch.setattr(attention_triton, "MAX_FUSED_ROWS", 0)
    attention.begin_step(batch)
    attention.attend(layer, query, key, value)
    assert not waits[-1], "a kernel of its own stands between the list and attention"


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


def decode_step(rows: PagedRows) -> tuple[AttentionBatch, PagedLayer, Tensor]:
    """Gives a step of one more token a row, at the end of what the row has; its layer, and queries."""
    count, nothing = len(rows.lengths), np.zeros(0, dtype=np.int32)
    angles = torch.rand(count, 4).repeat(1, 2)
    batch = AttentionBatch(
        num_tokens=count,
        num_decode=count,
        max_query_length=1,
        max_kv_length=int(rows.lengths.max()),
        positions=rows.lengths - 1,
        slots=torch.stack([rows.slots(row)[-1] for row in range(count)]),
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        kv_lengths=rows.lengths,
        block_tables=rows.tables,
        host_starts=nothing,
        host_query_starts=nothing,
        host_kv_lengths=nothing,
        host_block_tables=nothing,
        cosines=angles.cos(),
        sines=angles.sin(),
    )
    shape = rows.layer.shape
    return batch, rows.layer, torch.randn(count, shape.num_heads, shape.head_dim)
