"""The compiled CPU kernels against the torch ones, and against themselves: the same bits in any company."""

import ctypes
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megallm.core_async.device.cpu_build import load_library
from megallm.core_async.device.cpu_kernels import (
    GATED_CHUNK,
    SOURCE,
    CompiledKernels,
    CpuKernels,
    load_kernels,
)
from megallm.core_async.device.cpu_reference import TorchKernels
from tests.device.paged_batches import PagedBatch

REFERENCE = TorchKernels()
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives the session's own folder of built files, so that the kernels are built by the tests."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def kernels(cache_dir: Path) -> CpuKernels:
    """Gives the compiled kernels; a machine that can't build them can't run these tests."""
    loaded = load_kernels(cache_dir=cache_dir)
    assert loaded.is_compiled
    return loaded


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs a test on one thread and on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares to 1e-5 of the largest value."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=TOLERANCE * max(1.0, float(expected.abs().max()))
    )


# ---- the same as torch ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    m=st.one_of(st.integers(1, 20), st.sampled_from([63, 65, 130])),
    n=st.integers(1, 80),
    k=st.one_of(st.integers(1, 70), st.sampled_from([767, 768, 770, 1600])),
    has_bias=st.booleans(),
)
def test_linear_gives_torchs_product(kernels: CpuKernels, m: int, n: int, k: int, has_bias: bool) -> None:  # noqa: FBT001 - drawn by name
    """Any model's sizes come by, tiles or not, and the output head has one bias more."""
    generator = torch.Generator().manual_seed(m * 1000 + n)
    x, weight = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator) if has_bias else None
    assert_close(kernels.linear(x, weight, bias), REFERENCE.linear(x, weight, bias))


def test_linear_keeps_leading_dimensions_and_takes_any_strides(kernels: CpuKernels, threads: int) -> None:
    """Megatron's activations are `[tokens, 1, hidden]`, and slices of them are not contiguous."""
    x, weight = torch.randn(7, 2, 40)[:, :1, :33], torch.randn(50, 33)
    assert_close(kernels.linear(x, weight), REFERENCE.linear(x, weight))
    by_columns = weight.t().contiguous().t()
    assert_close(kernels.linear(x, by_columns), REFERENCE.linear(x, weight))


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150)), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(16, 16), (64, 64), (20, 24), (48, 7), (80, 130)]),
    block_size=st.sampled_from([1, 3, 16, 64, 256]),
    window=st.sampled_from([None, 0, 5, 70]),
)
def test_paged_attention_gives_torchs(  # noqa: PLR0917 - drawn by name
    kernels: CpuKernels,
    rows: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    window: int | None,
) -> None:
    """Decode rows and chunks share a call, blocks lie anywhere, and what is outside a row is NaN."""
    batch = PagedBatch(
        [(queries, queries + cached) for queries, cached in rows],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        value_dim=dims[1],
        block_size=block_size,
        window=window,
    )
    assert_close(batch.attend(kernels), batch.attend(REFERENCE))


@pytest.mark.parametrize("window", [None, 40])
def test_paged_attention_of_long_chunks_gives_torchs(
    kernels: CpuKernels, threads: int, window: int | None
) -> None:
    """Chunks that are cut into several tiles, with rows enough that all heads go together, and too few."""
    for rows in ([(150, 150), (1, 70), (100, 230)], [(1, 90 + row) for row in range(12)]):
        batch = PagedBatch(rows, heads=6, kv_heads=2, head_dim=32, value_dim=32, block_size=16, window=window)
        assert_close(batch.attend(kernels), batch.attend(REFERENCE))


def test_paged_attention_takes_queries_of_any_strides(kernels: CpuKernels) -> None:
    """Queries are often a slice of the product that made queries, keys and values together."""
    batch = PagedBatch([(3, 20), (1, 9)])
    expected = batch.attend(kernels)
    wide = torch.randn(4, 9, 20)
    wide[:, 1:7, :16] = batch.queries
    batch.queries = wide[:, 1:7, :16]
    assert torch.equal(batch.attend(kernels), expected)


@pytest.mark.parametrize("rotary_dim", [None, 16, 32, 64], ids=["none", "a quarter", "half", "all"])
def test_rope_and_cache_write_gives_torchs(kernels: CpuKernels, threads: int, rotary_dim: int | None) -> None:
    """Queries and keys turn in place, strided or not; the cache gets the turned keys, and no other slot."""
    tokens = 90
    angles = torch.randn(tokens, (rotary_dim or 2) // 2).repeat(1, 2)
    cos, sin = (None, None) if rotary_dim is None else (angles.cos(), angles.sin())
    mixed = torch.randn(tokens, 12, 64)
    value = torch.randn(tokens, 3, 24)
    slots = torch.randperm(128)[:tokens]
    results: list[tuple[Tensor, ...]] = []
    for each in (kernels, REFERENCE):
        both = mixed.clone()
        caches = (torch.full((8, 16, 3, 64), 7.0), torch.full((8, 16, 3, 24), 7.0))
        each.rope_and_cache_write(both[:, :9], both[:, 9:], value, cos, sin, slots, *caches)
        results.append((both, *caches))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("width", [5, 16, 576, 1000])
def test_norms_and_gate_give_torchs(kernels: CpuKernels, threads: int, width: int) -> None:
    """One token or a long prompt, widths that fill vectors or do not."""
    for tokens in (1, 70):
        x, residual, weight = torch.randn(tokens, 1, width), torch.randn(tokens, 1, width), torch.randn(width)
        assert_close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
        sums = (residual.clone(), residual.clone())
        normed = [
            each.add_rms_norm(x, into, weight, 1e-5)
            for each, into in zip((kernels, REFERENCE), sums, strict=True)
        ]
        assert_close(normed[0], normed[1])
        assert torch.equal(sums[0], sums[1])
        gate_up = torch.randn(tokens, 1, 2 * width) * 30
        assert_close(kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_gated_linear_is_its_two_parts(kernels: CpuKernels, threads: int, has_bias: bool) -> None:  # noqa: FBT001 - a parameter
    """To the last bit, in one chunk and in several; and close to torch's."""
    weight, bias = torch.randn(40, 12), torch.randn(40) if has_bias else None
    for tokens in (1, 3, GATED_CHUNK, GATED_CHUNK + 5):
        x = torch.randn(tokens, 1, 12)
        gated = kernels.gated_linear(x, weight, bias)
        assert torch.equal(gated, kernels.silu_mul(kernels.linear(x, weight, bias)))
        assert_close(gated, REFERENCE.gated_linear(x, weight, bias))


def test_the_exponential_reaches_its_ends(kernels: CpuKernels) -> None:
    """Activations of a broken or hot model are huge; silu must still be 0, x, or NaN where torch's is."""
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, -87.0, 0.0, 88.0, 1e30, math.inf, math.nan])
    gate_up = torch.cat((gate, torch.ones(10)))
    actual, expected = kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


# ---- the same in any company ---------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(96, 576), (50, 1600), (33, 50)])
def test_a_row_of_linear_has_the_same_bits_in_every_batch(kernels: CpuKernels, n: int, k: int) -> None:
    """Else a request's tokens would depend on who else is served, and a prefix hit could change an answer."""
    x, weight, bias = torch.randn(200, k), torch.randn(n, k), torch.randn(n)
    expected = kernels.linear(x, weight, bias)
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for m in (*range(1, 18), 31, 64, 65, 130):
                for first in (0, 3):
                    part = kernels.linear(x[first : first + m], weight, bias)
                    assert torch.equal(part, expected[first : first + m]), (num_threads, m, first)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("window", [None, 70])
def test_a_query_attends_with_the_same_bits_in_every_chunk(
    kernels: CpuKernels, threads: int, window: int | None
) -> None:
    """Decoded one by one, prefilled in chunks or at once, alone or beside others: one and the same result."""
    length = 180
    batch = PagedBatch([(length, length), (7, 30)], head_dim=40, value_dim=48, block_size=16, window=None)
    batch.window = window
    expected = batch.attend(kernels)[:length]
    for cuts in ([0, 1, 2, 50, 180], [0, 33, 97, 180], list(range(length + 1))):
        parts = [batch.attend_part(kernels, 0, *span) for span in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), expected), cuts


def test_norms_and_gate_have_the_same_bits_in_every_batch(kernels: CpuKernels, threads: int) -> None:
    """The small kernels keep the promise of the large ones."""
    x, weight = torch.randn(90, 1002), torch.randn(1002)
    normed, gated = kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(x)
    for row in (0, 1, 89):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(kernels.silu_mul(x[row]), gated[row])


# ---- what is refused, and what falls back --------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_a_row_without_a_query_or_with_too_short_a_context_is_refused(
    kernels: CpuKernels, *, compiled: bool
) -> None:
    """The softmax of nothing is NaN, and would be a token."""
    each = kernels if compiled else REFERENCE
    batch = PagedBatch([(1, 5), (2, 6)])
    batch.query_starts = torch.tensor([0, 3, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="row 1 has 0 queries and a context of 6 tokens"):
        batch.attend(each)
    batch.query_starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    batch.context_lengths[1] = 1
    with pytest.raises(ValueError, match="row 1 has 2 queries and a context of 1 tokens"):
        batch.attend(each)


def test_other_dtypes_run_in_torch(kernels: CpuKernels) -> None:
    """A bfloat16 model is served, if slower, by the same calls."""
    dtype = torch.bfloat16
    x, weight = torch.randn(3, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)
    assert torch.equal(kernels.linear(x, weight), REFERENCE.linear(x, weight))
    assert torch.equal(kernels.rms_norm(x, weight[0], 1e-5), REFERENCE.rms_norm(x, weight[0], 1e-5))
    assert torch.equal(kernels.silu_mul(x), REFERENCE.silu_mul(x))
    assert torch.equal(kernels.gated_linear(x, weight), REFERENCE.gated_linear(x, weight))
    sums = (x.clone(), x.clone())
    normed = [
        each.add_rms_norm(x, s, weight[0], 1e-5) for each, s in zip((kernels, REFERENCE), sums, strict=True)
    ]
    assert torch.equal(normed[0], normed[1])
    written: list[tuple[Tensor, Tensor]] = []
    for each in (kernels, REFERENCE):
        keys, values = torch.zeros(1, 4, 1, 8, dtype=dtype), torch.zeros(1, 4, 1, 8, dtype=dtype)
        q, k = x[:, None].repeat(1, 2, 1), x[:, None].clone()
        each.rope_and_cache_write(q, k, k, x.cos(), x.sin(), torch.arange(3), keys, values)
        out = torch.zeros_like(q)
        table, starts, lengths = (torch.tensor(column).int() for column in ([[0]], [0, 3], [3]))
        each.paged_attention(q, keys, values, table, starts, lengths, 1.0, out)
        written.append((keys, out))
    for actual, expected in zip(*written, strict=True):
        assert torch.equal(actual, expected)
        assert actual.any()


def test_without_a_compiler_the_torch_kernels_are_given(tmp_path: Path) -> None:
    """The engine starts on any machine."""
    assert not load_kernels(cache_dir=tmp_path, compiler=str(tmp_path / "no-such-compiler")).is_compiled


# ---- threads -------------------------------------------------------------------------------------


def test_callers_on_several_threads_do_not_disturb_each_other(kernels: CpuKernels) -> None:
    """Two engines in one process have a rank thread each; the kernels' threads serve one caller at a time."""
    x, weight = torch.randn(40, 64), torch.randn(300, 64)
    expected = kernels.linear(x, weight)
    differing: list[int] = []

    def call() -> None:
        torch.set_num_threads(2)
        differing.extend(i for i in range(150) if not torch.equal(kernels.linear(x, weight), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    torch.set_num_threads(1)
    assert differing == []


def test_a_forked_child_calls_the_kernels_too(cache_dir: Path, kernels: CpuKernels) -> None:
    """A data loader forks; the child has none of its parent's threads, and must not wait for them."""
    del kernels  # it built the file
    (built,) = cache_dir.glob("*.so")
    program = (
        "import ctypes, os, sys, array\n"
        "gate = ctypes.CDLL(sys.argv[1]).megallm_silu_mul\n"
        "gate.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3\n"
        "x, y = array.array('f', [1.0] * 400000), array.array('f', [0.0] * 200000)\n"
        "call = lambda: gate(x.buffer_info()[0], y.buffer_info()[0], 1000, 200, 2)\n"
        "call()\n"
        "child = os.fork()\n"
        "call()\n"
        "assert set(y) == {y[0]} and abs(y[0] - 0.7310586) < 1e-6, y[0]\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(built)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_the_library_is_not_loaded_twice(cache_dir: Path, kernels: CpuKernels) -> None:
    """Two models in one process share one team of threads."""
    assert isinstance(kernels, CompiledKernels)
    first, second = (load_library(SOURCE, cache_dir=cache_dir) for _ in range(2))
    assert first is not None
    assert second is not None
    addresses = {ctypes.cast(each["megallm_linear"], ctypes.c_void_p).value for each in (first, second)}
    assert len(addresses) == 1
