"""The CPU backend against attention by definition, with compiled kernels and without."""

from dataclasses import replace

import pytest
import torch

from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_cpu import ColumnMajorOps, CpuAttention, CpuOps
from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.cpu_kernels import CpuKernels, load_kernels
from megallm.core_async.device.cpu_reference import TorchKernels
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.model import ModelHook
from tests.device.batches import Case, attended
from tests.device.conftest import built

GROUPED = LayerShape(num_heads=6, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3)
DECODE_AND_CHUNKS = [(30, 1), (2, 1), (0, 1), (9, 1), (0, 7), (5, 6), (3, 1), (8, 8)]
SHAPES = {
    "grouped heads": GROUPED,
    "one kv head per head": LayerShape(4, 4, 8, 8, 0.3),
    "narrow values": LayerShape(4, 4, 8, 5, 0.3),
    "window": LayerShape(6, 2, 8, 8, 0.3, window=4),
    "turned": LayerShape(6, 2, 8, 8, 0.3, uses_rope=True),
    "turned, odd head": LayerShape(6, 2, 20, 20, 0.3, uses_rope=True),
}


@pytest.fixture(scope="module", params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """Gives each kind of kernels."""
    return load_kernels() if request.param == "compiled" else TorchKernels()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_rows_attend_by_definition(kernels: CpuKernels, name: str, block_size: int) -> None:
    """Decode rows, whole prompts and chunks in one call; NaN stands wherever nothing was written."""
    case = Case(DECODE_AND_CHUNKS, SHAPES[name], num_decode=4, block_size=block_size, rotary_dim=8)
    got, expected = attended(CpuAttention(kernels), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_interleaved_pairs_are_turned_before_the_kernel(kernels: CpuKernels) -> None:
    """The kernel knows halves alone; a model with the other layout must not be turned by it."""
    case = Case(DECODE_AND_CHUNKS, SHAPES["turned"], num_decode=4, rotary_dim=8, is_rope_interleaved=True)
    got, expected = attended(CpuAttention(kernels), case)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_other_dtypes_run_too(kernels: CpuKernels) -> None:
    """Asked for by name, the backend serves a model in bfloat16, in torch."""
    case = replace(Case(DECODE_AND_CHUNKS, GROUPED, num_decode=4), dtype=torch.bfloat16)
    got, expected = attended(CpuAttention(kernels), case)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.03)


def test_sinks_are_refused_by_their_name(kernels: CpuKernels) -> None:
    """The kernel's softmax has no term for them."""
    refusal = CpuAttention(kernels).refusal(LayerShape(6, 2, 8, 8, 0.3, has_sinks=True))
    assert refusal is not None
    assert "softmax_type" in refusal
    assert CpuAttention(kernels).refusal(SHAPES["window"]) is None


def test_arithmetic_is_torchs(kernels: CpuKernels) -> None:
    """A layer must not care which it runs on, and its residual stays its own."""
    ops, expected = CpuOps(kernels), TorchOps()
    generator = torch.Generator().manual_seed(0)
    rows, residual = (torch.randn(5, 48, generator=generator) for _ in range(2))
    weight, bias = torch.randn(40, 48, generator=generator), torch.randn(40, generator=generator)
    scale = torch.rand(48, generator=generator)
    torch.testing.assert_close(ops.linear(rows, weight, bias), expected.linear(rows, weight, bias))
    torch.testing.assert_close(ops.linear(rows, weight, None), expected.linear(rows, weight, None))
    torch.testing.assert_close(ops.rms_norm(rows, scale, 1e-5), expected.rms_norm(rows, scale, 1e-5))
    torch.testing.assert_close(ops.silu_gate(rows), expected.silu_gate(rows))
    kept = residual.clone()
    for got, wanted in zip(
        ops.add_rms_norm(rows.clone(), residual, scale, 1e-5),
        expected.add_rms_norm(rows.clone(), kept, scale, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
    assert residual.equal(kept)


@pytest.mark.parametrize("name", ["grouped heads", "tied, interleaved rotary"])
def test_weights_laid_out_by_columns_are_the_same_parameters_and_are_given_back(name: str) -> None:
    """A trainer's update in place must land in them, and an embedding keep its rows together."""
    model = built(name)
    before = {key: (id(weight), weight.stride(), weight.clone()) for key, weight in model.named_parameters()}
    hook = ModelHook(model)
    caches = [LayerCache() for _ in hook.shape.attention_layers]
    hook.bind(SdpaAttention(4), caches, ColumnMajorOps(), max_positions=32)
    laid_out = {key for key, weight in model.named_parameters() if weight.stride() != before[key][1]}
    assert all(id(weight) == before[key][0] for key, weight in model.named_parameters())
    assert all(weight.equal(before[key][2]) for key, weight in model.named_parameters())
    hook.unbind()
    assert all(weight.stride() == before[key][1] for key, weight in model.named_parameters())
    assert "embedding.word_embeddings.weight" not in laid_out
    assert len(laid_out) == 4 * 3 + (name == "grouped heads")
