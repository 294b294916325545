"""Heads normed and turned within attention, in Triton's interpreter: the kernel before it is the measure."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from megallm.core_async.device.attention import HeadNorm, HeadNorms, LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.rope import table_of
from megallm.core_async.device.triton_decode import decode_attention
from megallm.core_async.device.triton_heads import NewTokens, arguments_of
from megallm.core_async.device.triton_layer import turn_and_write
from megallm.core_async.device.triton_work import RowParts, row_parts
from tests.device.paged_rows import PagedRows

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

LENGTHS = [1, 150, 0, 65, 3]


@dataclass(frozen=True)
class Heads:
    """A layer's facts, how its heads turn, and which of them are normed."""

    shape: LayerShape
    rotary_dim: int
    is_interleaved: bool = False
    norms: str = "query and key"


HEADS = {
    "grouped": Heads(LayerShape(6, 2, 16, 16, 0.02), 16),
    "one kv head, odd widths, a third turns": Heads(LayerShape(3, 1, 24, 10, 0.02), 8),
    "a kv head each, interleaved": Heads(LayerShape(3, 3, 16, 16, 0.02), 16, is_interleaved=True),
    "half turns, interleaved, keys normed": Heads(LayerShape(4, 2, 16, 16, 0.02), 8, True, "key"),
    "none turn": Heads(LayerShape(4, 2, 16, 16, 0.02), 0),
    "none turn, queries normed": Heads(LayerShape(4, 2, 24, 24, 0.02), 0, norms="query"),
    "as they are": Heads(LayerShape(20, 1, 16, 16, 0.02), 0, norms=""),
    "window and sinks": Heads(LayerShape(4, 2, 16, 16, 0.02, window=70, has_sinks=True), 16, norms=""),
    "window of the newest": Heads(LayerShape(4, 2, 16, 16, 0.02, window=0), 16),
    "softcap": Heads(LayerShape(4, 2, 16, 16, 0.5, softcap=0.7), 16),
}


@dataclass(frozen=True)
class Step:
    """Rows whose last token is not in the cache yet, and what the step brings of it."""

    batch: PagedRows
    query: Tensor
    new: NewTokens
    parts: RowParts

    def attended(self, fill: Callable[[PagedLayer, Tensor], NewTokens | None]) -> tuple[Tensor, LayerCache]:
        """Gives what attention gives, 7 where nothing, and the cache, when `fill` did what it does."""
        layer, cache = self.batch.layer, LayerCache()
        cache.place(layer.cache.keys.clone(), layer.cache.values.clone())
        layer, query = replace(layer, cache=cache), self.query.clone()
        out = query.new_full((len(query), layer.shape.num_heads, layer.shape.value_head_dim), 7.0)
        new = fill(layer, query)
        tables = self.batch.tables
        decode_attention(layer, query, block_tables=tables, parts=self.parts, out=out, new=new)
        return out, cache

    def write(self, layer: PagedLayer, query: Tensor) -> None:
        """Norms, turns and writes by the kernel that does nothing else."""
        new, interleaved = self.new, self.new.is_interleaved
        turn_and_write(
            query,
            new.key,
            new.value,
            new.cosines,
            new.sines,
            new.slots,
            layer.cache,
            is_interleaved=interleaved,
            norms=new.norms,
        )


def step_of(heads: Heads, *, block_size: int, max_cuts: int) -> Step:
    """Gives heads of small whole numbers, whose squares have one sum in whatever order."""
    shape, num_rows = heads.shape, len(LENGTHS)
    batch = PagedRows(LENGTHS, shape, block_size=block_size, dtype=torch.float16)
    generator = torch.Generator().manual_seed(shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    size = (num_rows, shape.num_kv_heads, group + 2, shape.head_dim)
    mixed = torch.randint(-9, 10, size, generator=generator).half()
    cosines = sines = None
    if heads.rotary_dim:
        angles = torch.rand(num_rows, heads.rotary_dim // 2, generator=generator)
        both = angles.repeat_interleave(2, -1) if heads.is_interleaved else torch.cat((angles, angles), -1)
        table = table_of(both, factor=1.25, is_interleaved=heads.is_interleaved, dtype=torch.float16)
        cosines, sines = table.cosines, table.sines
    norms: list[HeadNorm | None] = []
    for name, epsilon in (("query", 1e-5), ("key", 0.5)):
        norm = nn.RMSNorm(shape.head_dim, eps=epsilon)
        norm.weight = nn.Parameter(torch.rand(shape.head_dim, generator=generator).half() + 0.5)
        norms.append(HeadNorm(module=norm, epsilon=epsilon) if name in heads.norms else None)
    # the row without tokens has a slot as others do, in a block that no row owns
    owned = set(batch.tables.flatten().tolist())
    unowned = min(set(range(len(batch.layer.cache.keys))) - owned) * block_size
    slots = torch.tensor([int(batch.slots(row)[-1]) if LENGTHS[row] else unowned for row in range(num_rows)])
    for tensor in (batch.layer.cache.flat_keys, batch.layer.cache.flat_values):
        tensor[slots] = torch.nan
    new = NewTokens(
        key=mixed[:, :, -2],
        value=mixed[:, :, -1, : shape.value_head_dim],
        cosines=cosines,
        sines=sines,
        slots=slots,
        is_interleaved=heads.is_interleaved,
        norms=HeadNorms(*norms),
    )
    parts = row_parts(batch.lengths, batch.rows, window=shape.window, max_cuts=max_cuts, min_keys=64)
    # programs run in any order: of two parts the one with the newest key comes first here
    for count, first, last, _ in parts.rows.tolist():
        if count == 2:
            parts.parts[[first, last]] = parts.parts[[last, first]]
    parts.rows[parts.rows[:, 0] == 2, 1:3] = parts.rows[parts.rows[:, 0] == 2, 1:3].flip(1)
    return Step(batch, mixed[:, :, :-2], new, parts)


CUTS = [(16, 0), (16, 9), (24, 9), (64, 3)]
"""Sizes of blocks, and parts beyond one a row; each kind of head takes one or two in turn."""


@pytest.mark.parametrize(
    ("name", "block_size", "max_cuts"),
    [
        (name, *CUTS[(place + turn) % 4])
        for place, name in enumerate(HEADS)
        for turn in (1, 3)[: 1 + (place < 5)]
    ],
)
def test_attention_does_what_the_kernel_before_it_did(name: str, block_size: int, max_cuts: int) -> None:
    """The cache is the same to the bit, but for the slot of a row without tokens: nobody writes it."""
    step = step_of(HEADS[name], block_size=block_size, max_cuts=max_cuts)
    expected, expected_cache = step.attended(step.write)
    got, cache = step.attended(lambda _layer, _query: step.new)
    differences, sizes = ((x.double().flatten(1).norm(dim=1)) for x in (got - expected, expected))
    errors = differences / sizes
    assert float(errors.max()) < 2e-3
    assert bool((got[2] == 7).all())
    left_out = int(step.new.slots[2])
    for written, wanted in zip(
        (cache.flat_keys, cache.flat_values),
        (expected_cache.flat_keys, expected_cache.flat_values),
        strict=True,
    ):
        assert bool(wanted[left_out].isfinite().all())
        assert bool(written[left_out].isnan().all())
        wanted[left_out] = torch.nan
        torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)


def test_newest_key_may_have_a_part_to_itself() -> None:
    """65 keys in parts of 64: then no other key is there to begin with, and none to go over."""
    parts = step_of(HEADS["grouped"], block_size=16, max_cuts=9).parts
    listed = [tuple(part[1:4]) for part in parts.parts[: int(parts.num_parts)].tolist()]
    assert (3, 64, 65) in listed


def test_without_new_tokens_every_step_has_the_same_kernel() -> None:
    """What is compiled for such a step depends on the layer alone; what stands for tensors is never read."""
    query = torch.zeros(2, 3, 4, 8)
    arguments = arguments_of(None, query)
    assert all(value is query for value in arguments.values() if isinstance(value, Tensor))
    assert {name: value for name, value in arguments.items() if name.isupper()} == {
        "TAKES_NEW": False,
        "ROTARY_DIM": 0,
        "IS_INTERLEAVED": False,
        "NORMS_QUERY": False,
        "NORMS_KEY": False,
    }
