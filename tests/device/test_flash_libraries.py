"""The flash-attn packages' functions, stood in for by their definition with the packages' own arguments."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_flash import FlashAttention
from megallm.core_async.device.flash_libraries import FlashAttn2, FlashAttn3, FlashAttn4, FlashLibrary
from tests.device.batches import Case, attended

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

ROWS = [(20, 1), (0, 1), (0, 5), (5, 6)]
DECODES = [(20, 1), (7, 1)]
SHAPES = {
    "grouped heads": LayerShape(6, 2, 8, 8, 0.3),
    "window": LayerShape(6, 2, 8, 8, 0.3, window=4),
    "softcap": LayerShape(6, 2, 8, 8, 0.3, softcap=0.7),
    "turned": LayerShape(6, 2, 8, 8, 0.3, uses_rope=True),
}
type Window = tuple[int | None, int | None]


def rows_attended(  # noqa: PLR0917 - what the packages take
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    scale: float,
    window: Window,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Gives the attention of paged rows; a window of None or -1 has no end."""
    out = torch.zeros(*query.shape[:2], values.shape[3])
    group = query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        blocks = tables[row, : math.ceil(length / keys.shape[1])].long()
        key, value = (part[blocks].flatten(0, 1)[:length].float() for part in (keys, values))
        scores = (
            torch.einsum("qhd,khd->hqk", query[first:last].float(), key.repeat_interleave(group, 1)) * scale
        )
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        distances = torch.arange(length - last + first, length)[:, None] - torch.arange(length)
        is_hidden = distances < 0
        if window[0] is not None and window[0] >= 0:
            is_hidden |= distances > window[0]
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, last - first, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))
    return out.to(query.dtype)


def varlen_of_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Stands in for `flash_attn.cute.flash_attn_varlen_func`."""
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    return (
        rows_attended(
            q, k, v, starts, lengths, page_table, softmax_scale, window_size, softcap, learnable_sink
        ),
        max_seqlen_q * q.new_ones(1),
    )


def with_kvcache_of_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    softcap: float,
) -> Tensor:
    """Stands in for `flash_attn_interface.flash_attn_with_kvcache`."""
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    return rows_attended(
        q, k_cache, v_cache, starts, lengths, page_table, softmax_scale, window_size, softcap
    )


def varlen_of_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    """Stands in for `flash_attn.flash_attn_varlen_func`."""
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    lengths = cu_seqlens_k.diff().tolist()
    assert max_seqlen_k >= max(lengths)
    starts = cu_seqlens_q.tolist()
    return rows_attended(q, k, v, starts, lengths, block_table, softmax_scale, window_size, softcap)


def with_kvcache_of_2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    softcap: float,
) -> Tensor:
    """Stands in for `flash_attn.flash_attn_with_kvcache`."""
    assert causal
    starts, lengths = list(range(len(q) + 1)), cache_seqlens.tolist()
    attended = rows_attended(
        q[:, 0], k_cache, v_cache, starts, lengths, block_table, softmax_scale, window_size, softcap
    )
    return attended[:, None]


LIBRARIES: list[FlashLibrary] = [
    FlashAttn4(varlen_of_4),
    FlashAttn3(with_kvcache_of_3),
    FlashAttn2(varlen_of_2, with_kvcache_of_2),
]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("parts", [ROWS, DECODES])
def test_each_version_is_called_with_what_it_names(
    library: FlashLibrary, name: str, parts: list[tuple[int, int]]
) -> None:
    """The packages are on no test machine; a wrong argument would show on a user's alone."""
    case = Case(parts, SHAPES[name], num_decode=2, block_size=4, rotary_dim=8)
    got, expected = attended(FlashAttention(library, 4, torch.float32), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_only_version_4_has_sinks() -> None:
    """A layer's sinks left out would change every weight."""
    shape = LayerShape(6, 2, 8, 8, 0.3, has_sinks=True)
    case = Case(ROWS, shape, num_decode=2, block_size=4)
    got, expected = attended(FlashAttention(LIBRARIES[0], 4, torch.float32), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    refused = [library.refusal(shape, block_size=256) for library in LIBRARIES]
    assert [reason is None for reason in refused] == [True, False, False]


def test_version_2_takes_blocks_of_256_alone() -> None:
    """The remedy is one field of the config."""
    shape = LayerShape(6, 2, 8, 8, 0.3)
    assert LIBRARIES[2].refusal(shape, block_size=512) is None
    reason = LIBRARIES[2].refusal(shape, block_size=64)
    assert reason is not None
    assert "block_size_tokens is 64" in reason
    assert "set InferenceConfig.block_size_tokens to 256" in reason


def test_heads_that_no_version_takes_are_refused() -> None:
    """The packages would raise in the middle of a step."""
    for library in LIBRARIES:
        assert "multiples of 8" in str(library.refusal(LayerShape(4, 4, 12, 12, 1.0), block_size=256))
        assert "up to 256" in str(library.refusal(LayerShape(4, 4, 320, 320, 1.0), block_size=256))
    narrow = LayerShape(4, 4, 192, 128, 1.0)
    assert [library.refusal(narrow, block_size=256) is None for library in LIBRARIES] == [True, False, False]
