"""The second kernel of decode attention: joins the parts of rows whose keys several programs took.

After "Flash-Decoding for long-context inference" (Dao, Haziza, Massa and Sizov, 2023): a part weighs by the
sum of its softmax.

Kernels in Triton. Knows tensors and the list of parts; knows no step. Import it only where it runs: Triton
comes with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (what a kernel's parameters are is Triton's own matter)

import triton
import triton.language as tl
from torch import Tensor

from megallm.core_async.device.attention import PagedLayer
from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_launch import chained, follow
from megallm.core_async.device.triton_work import RowParts

JOINED = 16
"""Parts that are joined at a time."""


def join(layer: PagedLayer, parts: RowParts, sums: Tensor, sizes: Tensor, out: Tensor) -> None:
    """Makes one of the parts of each row that has several, into `out`, `[rows, num_heads, value_head_dim]`.

    `sums`, `[parts * num_heads, value_head_dim]`, are each part's means of the values by the softmax over its
    own keys; `sizes`, `[parts * num_heads]`, the logarithms of its sums of weights, to base 2. Both float32.
    """
    value_dim = layer.shape.value_head_dim
    launch(
        _join_parts,
        (layer.shape.num_heads, len(parts.rows)),
        sums,
        sizes,
        parts.rows,
        out if layer.sinks is None else layer.sinks,
        out,
        VALUE_DIM=value_dim,
        VALUE_WIDTH=triton.next_power_of_2(value_dim),
        HAS_SINKS=layer.sinks is not None,
        JOINED=JOINED,
        num_warps=2,
        **chained(parts.rows),
    )


@triton.jit
def _join_parts(
    sums, sizes, rows, sinks, out, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, JOINED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    head, heads, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    at_row = rows + row * 4
    count, first_place, last_place = tl.load(at_row), tl.load(at_row + 1), tl.load(at_row + 2)
    follow(CHAINED)
    if count <= 1:
        return
    dims = tl.arange(0, VALUE_WIDTH)
    best = -1.0e30
    total = 0.0
    if HAS_SINKS:
        best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    mixed = tl.zeros((VALUE_WIDTH,), tl.float32)
    for first in range(0, count, JOINED):
        some = first + tl.arange(0, JOINED)
        at = tl.where(some < count - 1, first_place + some, last_place) * heads + head
        some_sizes = tl.load(sizes + at, mask=some < count, other=-1.0e30)
        new_best = tl.maximum(best, tl.max(some_sizes, 0))
        weights = tl.exp2(some_sizes - new_best)
        some_sums = tl.load(
            sums + at[:, None] * VALUE_DIM + dims[None, :],
            mask=(some < count)[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        shrink = tl.exp2(best - new_best)
        mixed = mixed * shrink + tl.sum(some_sums * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        best = new_best
    at_out = (row.to(tl.int64) * heads + head) * VALUE_DIM + dims
    tl.store(out + at_out, (mixed / total).to(out.dtype.element_ty), mask=dims < VALUE_DIM)
