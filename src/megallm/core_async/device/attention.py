"""What attention is to the rest: the layer's facts, the step's batch, and the protocol of a backend.

Knows shapes and where a token's keys and values lie; knows no model and no kernel.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, nn

from megallm.core_async.device.kv_cache import LayerCache

IntColumn = NDArray[np.int32]


class LayerShape(Struct, frozen=True):
    """What one attention layer is on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_head_dim: int
    scale: float
    """Factor on the scores, before the softmax."""
    window: int | None = None
    """How many tokens before its own a query sees; None is all."""
    softcap: float | None = None
    """Scores s become `softcap * tanh(s / softcap)`, before the softmax; None is as they are."""
    uses_rope: bool = False
    """The backend turns queries and keys; else they arrive turned, or are not to be."""
    has_sinks: bool = False
    """The softmax has one more term per head, a logit without a value."""


class HeadNorm(Struct, frozen=True, eq=False):
    """The norm of queries or of keys: each head over its root mean square, times a weight."""

    module: nn.RMSNorm
    """The model's own, over `head_dim`."""
    epsilon: float

    @property
    def weight(self) -> Tensor:
        """Gives the module's weight as it is now, `[head_dim]`: a trainer may put another in its place."""
        return self.module.weight


class HeadNorms(Struct, frozen=True, eq=False):
    """The norms of a layer's queries and keys, before they turn; None where it has no such norm."""

    query: HeadNorm | None = None
    key: HeadNorm | None = None


class PagedLayer(Struct, frozen=True, eq=False):
    """One attention layer as a backend sees it: facts, place of its keys and values, sinks, norms."""

    shape: LayerShape
    cache: LayerCache
    sinks: Tensor | None = None
    """`[num_heads]`, the model's own tensor, so that an update in place is seen."""
    norms: HeadNorms | None = None
    """What queries and keys still lack when they arrive; for a backend that norms heads alone."""


class AttentionBatch(Struct, frozen=True, eq=False):
    """One step's rows and tokens as every layer's attention needs them; made once a step.

    Decode rows come first and have one query each. Columns come twice: int32 tensors on the
    device, and the numpy arrays they were made from, for whatever the host decides.
    """

    num_tokens: int
    num_decode: int
    max_query_length: int
    max_kv_length: int
    positions: Tensor
    """`[tokens]`."""
    slots: Tensor
    """`[tokens]`: where each token's key and value go."""
    query_starts: Tensor
    """`[rows + 1]`: index of each row's first token, then the number of tokens."""
    kv_lengths: Tensor
    """`[rows]`: tokens a row has in the cache once this step's are written."""
    block_tables: Tensor
    """`[rows, blocks]`: wide enough for the longest row; entries past a row's end mean nothing."""
    host_starts: IntColumn
    host_query_starts: IntColumn
    host_kv_lengths: IntColumn
    host_block_tables: IntColumn
    cosines: Tensor | None = None
    """`[tokens, rotary_dim]` in the model's dtype; None where no layer asks for rotary positions."""
    sines: Tensor | None = None
    is_rope_interleaved: bool = False
    table_rows: Tensor | None = None
    """`[rows]`: which of `block_tables` is each row's; None is its own place in the step."""
    chunk_lengths: Tensor | None = None
    """`[rows]`: `kv_lengths` of the rows with several queries, and 0 for the others.

    Where it is given any row may be either, or a place that nobody takes: `kv_lengths` is then that of
    decode rows and 0 for the others, and `num_decode` is the number of places. Else the rows after the
    first `num_decode` are those with several queries.
    """


class Attention(Protocol):
    """A backend: rotary positions, cache write and attention of packed rows, for every layer."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    @property
    def norms_heads(self) -> bool:
        """It takes layers with `norms`; else queries and keys must arrive normed."""
        ...

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; None when it can."""
        ...

    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepares what all layers of the step share; called before the first of them."""
        ...

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]` of this step's tokens.

        `query` is `[tokens, num_heads, head_dim]`, or the same with its heads by kv head, in four
        dimensions; `key` and `value` are `[tokens, num_kv_heads, ...]`. Keys and values are written to
        the cache. Inputs may be strided views, and may be overwritten.
        """
        ...


def refusals(attention: Attention, shapes: Sequence[LayerShape]) -> list[str]:
    """Lists why `attention` can't run some of the layers; empty when it can run all."""
    reasons = {shape: attention.refusal(shape) for shape in dict.fromkeys(shapes)}
    return [reason for reason in reasons.values() if reason is not None]
