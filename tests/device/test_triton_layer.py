"""Norms, gate, rotary positions and cache write, in Triton's interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device import triton_layer
from megallm.core_async.device.attention import HeadNorm, HeadNorms
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.rope import rotated, table_of
from megallm.core_async.device.triton_layer import add_rms_norm, rms_norm, silu_gate, turn_and_write

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_norm_is_of_the_last_dimension_of_strided_rows() -> None:
    """The norm of a head takes a part of the joint projection as it lies."""
    rows, weight = torch.randn(5, 4, 3, 16)[:, :, :2], torch.rand(16)
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), torch.rms_norm(rows, (16,), weight, 1e-5))


def test_sum_and_norm_leaves_the_residual_alone() -> None:
    """The residual may be what a user's hook kept."""
    rows, residual, weight = torch.randn(3, 48), torch.randn(3, 48), torch.rand(48)
    total, normed = add_rms_norm(rows.clone(), kept := residual.clone(), weight, 1e-5)
    assert kept.equal(residual)
    torch.testing.assert_close(total, rows + residual)
    torch.testing.assert_close(normed, torch.rms_norm(rows + residual, (48,), weight, 1e-5))


def test_gate_is_silu_of_the_first_half() -> None:
    """The halves swapped would still look like numbers; rows are wider than one program."""
    rows = torch.randn(2, 2 * 1100)
    expected = torch.nn.functional.silu(rows[:, :1100]) * rows[:, 1100:]
    torch.testing.assert_close(silu_gate(rows), expected)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_queries_turn_in_place_and_keys_on_their_way_to_the_cache(is_interleaved: bool) -> None:  # noqa: FBT001
    """Dimensions past the rotary ones pass; slots that are nobody's stay as they were."""
    mixed = torch.randn(3, 2, 5, 16)
    query, key, value = mixed[:, :, :3].clone(), mixed[:, :, 3], mixed[:, :, 4]
    angles = torch.rand(3, 4)
    both = angles.repeat_interleave(2, -1) if is_interleaved else torch.cat((angles, angles), -1)
    table = table_of(both, factor=1.0, is_interleaved=is_interleaved, dtype=torch.float32)
    cache = LayerCache()
    cache.place(torch.zeros(4, 2, 2, 16), torch.zeros(4, 2, 2, 16))
    slots = torch.tensor([7, 0, 3])
    turn_and_write(query, key, value, table.cosines, table.sines, slots, cache, is_interleaved=is_interleaved)

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        return rotated(vectors, table.cosines, table.sines, is_interleaved=is_interleaved)

    torch.testing.assert_close(query.flatten(1, 2), turned(mixed[:, :, :3].flatten(1, 2)))
    torch.testing.assert_close(cache.flat_keys[slots], turned(key))
    assert cache.flat_values[slots].equal(value)
    assert int((cache.flat_keys != 0).any(-1).any(-1).sum()) == 3


@dataclass(frozen=True)
class Heads:
    """What heads a layer has, how they turn, and which of them are normed."""

    head_dim: int
    rotary_dim: int
    is_interleaved: bool = False
    group: int = 3
    norms: str = "query and key"


HEADS = {
    "64, all turn": Heads(64, 64),
    "80, all turn": Heads(80, 80),
    "128, all turn": Heads(128, 128, group=2),
    "128, half turns": Heads(128, 64),
    "80, 24 turn": Heads(80, 24),
    "96, interleaved": Heads(96, 96, is_interleaved=True),
    "80, 32 turn, interleaved": Heads(80, 32, is_interleaved=True),
    "64, none turn": Heads(64, 0),
    "80, none turn": Heads(80, 0, group=1),
    "80, 24 turn, query alone": Heads(80, 24, norms="query"),
    "80, 24 turn, key alone": Heads(80, 24, norms="key"),
    "64, none turn, query alone": Heads(64, 0, norms="query"),
    "64, none turn, key alone": Heads(64, 0, norms="key"),
}


@dataclass(frozen=True)
class Step:
    """Some tokens' heads as one projection gives them, their angles, and a cache with a slot for each."""

    heads: Heads
    query: Tensor
    key: Tensor
    value: Tensor
    cosines: Tensor | None
    sines: Tensor | None
    slots: Tensor
    norms: HeadNorms

    def written(self, *, norms: HeadNorms | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the queries, and the whole cache of keys, as the kernel leaves them."""
        cache, size = LayerCache(), (len(self.slots), 2, 2, self.heads.head_dim)
        cache.place(torch.zeros(size, dtype=query.dtype), torch.zeros(size, dtype=query.dtype))
        turn_and_write(
            query,
            key,
            self.value,
            self.cosines,
            self.sines,
            self.slots,
            cache,
            is_interleaved=self.heads.is_interleaved,
            norms=norms,
        )
        assert cache.flat_values[self.slots].equal(self.value)
        return query, cache.flat_keys

    def turned(self, vectors: Tensor) -> Tensor:
        """Gives vectors turned in float32 and rounded, by torch."""
        if self.cosines is None or self.sines is None:
            return vectors
        angles = self.cosines.float(), self.sines.float()
        turned = rotated(vectors.float().flatten(1, -2), *angles, is_interleaved=self.heads.is_interleaved)
        return turned.view_as(vectors).to(vectors.dtype)


def step_of(heads: Heads, dtype: torch.dtype, count: int) -> Step:
    """Gives a step of small whole numbers, whose squares have one sum in whatever order."""
    generator = torch.Generator().manual_seed(heads.head_dim + heads.rotary_dim)
    mixed = torch.randint(-9, 10, (count, 2, heads.group + 2, heads.head_dim), generator=generator).to(dtype)
    cosines = sines = None
    if heads.rotary_dim:
        angles = torch.rand(count, heads.rotary_dim // 2, generator=generator)
        both = angles.repeat_interleave(2, -1) if heads.is_interleaved else torch.cat((angles, angles), -1)
        table = table_of(both, factor=1.25, is_interleaved=heads.is_interleaved, dtype=dtype)
        cosines, sines = table.cosines, table.sines
    norms = [nn.RMSNorm(heads.head_dim, eps=epsilon) for epsilon in (1e-5, 0.5)]
    for norm in norms:
        norm.weight = nn.Parameter(torch.rand(heads.head_dim, generator=generator).to(dtype) + 0.5)
    query, key = (
        HeadNorm(module=norm, epsilon=norm.eps or 0.0) if name in heads.norms else None
        for name, norm in zip(("query", "key"), norms, strict=True)
    )
    slots = torch.randperm(2 * count, generator=generator)[:count]
    parts = mixed[:, :, :-2], mixed[:, :, -2], mixed[:, :, -1]
    return Step(heads, *parts, cosines, sines, slots, HeadNorms(query=query, key=key))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_are_normed_before_they_turn(name: str, dtype: torch.dtype) -> None:
    """All of a head is, whatever part of it turns: torch's norm is the measure."""
    step = step_of(HEADS[name], dtype, 3)
    expected = [
        step.turned(
            vectors
            if norm is None
            else torch.rms_norm(vectors.float(), (vectors.shape[-1],), norm.weight.float(), norm.epsilon).to(
                dtype
            )
        )
        for vectors, norm in ((step.query.clone(), step.norms.query), (step.key, step.norms.key))
    ]
    query, keys = step.written(norms=step.norms, query=step.query, key=step.key)
    # a norm that torch rounds to the number next to ours is one digit off, and so is what is turned
    rtol, atol = (2e-3, 2e-3) if dtype is torch.float16 else (1e-5, 1e-6)
    torch.testing.assert_close(query, expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(keys[step.slots], expected[1], rtol=rtol, atol=atol)
    assert int((keys != 0).any(-1).any(-1).sum()) == len(step.slots)


@pytest.mark.parametrize("name", HEADS)
def test_fused_norm_equals_the_kernels_one_after_the_other(name: str) -> None:
    """It rounds where they do: to the bit, since these sums are the same in any order."""
    step = step_of(HEADS[name], torch.float16, 3)
    query, key = step.query.clone(), step.key
    if step.norms.query is not None:
        query = rms_norm(query, step.norms.query.weight, step.norms.query.epsilon)
    if step.norms.key is not None:
        key = rms_norm(key, step.norms.key.weight, step.norms.key.epsilon)
    one_by_one = step.written(norms=None, query=query, key=key)
    fused = step.written(norms=step.norms, query=step.query, key=step.key)
    assert fused[0].equal(one_by_one[0])
    assert fused[1].equal(one_by_one[1])


@pytest.mark.parametrize(("few", "some"), [(0, 99), (0, 0)])
def test_programs_of_several_tokens_norm_each_head_by_itself(
    monkeypatch: pytest.MonkeyPatch, few: int, some: int
) -> None:
    """Large steps take two or eight tokens a program, and the last program has fewer."""
    step = step_of(Heads(80, 24), torch.float32, 11)
    expected = step.written(norms=step.norms, query=step.query.clone(), key=step.key)
    monkeypatch.setattr(triton_layer, "FEW_TOKENS", few)
    monkeypatch.setattr(triton_layer, "SOME_TOKENS", some)
    query, keys = step.written(norms=step.norms, query=step.query, key=step.key)
    torch.testing.assert_close(query, expected[0])
    torch.testing.assert_close(keys, expected[1])
