"""What a backend refuses is said once for each kind of layer; whether it norms heads, by each."""

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device.attention import (
    Attention,
    AttentionBatch,
    HeadNorm,
    HeadNorms,
    LayerShape,
    PagedLayer,
    refusals,
)
from megallm.core_async.device.attention_cpu import CpuAttention
from megallm.core_async.device.attention_invariant import InvariantAttention
from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.cpu_reference import TorchKernels
from megallm.core_async.device.kv_cache import LayerCache
from tests.device.batches import Case, attended

PLAIN = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3)
WINDOWED = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3, window=9)


class NoWindows:
    """A backend that runs full attention alone."""

    name = "no windows"
    norms_heads = False

    def refusal(self, shape: LayerShape) -> str | None:
        """Refuses windows."""
        return None if shape.window is None else f"no window of {shape.window}"

    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepares nothing."""

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives the query."""
        return query


def test_reasons_are_given_once_for_equal_layers() -> None:
    """A model has dozens of layers of two kinds; the error names the reason, not the layers."""
    assert refusals(NoWindows(), [PLAIN, WINDOWED] * 20) == ["no window of 9"]
    assert refusals(NoWindows(), [PLAIN] * 20) == []


class Expecting:
    """A backend handed norms for its layer, though it norms no heads."""

    norms_heads = False

    def __init__(self, attention: Attention) -> None:
        self.name = attention.name
        self._attention = attention

    def refusal(self, shape: LayerShape) -> str | None:
        """Refuses nothing."""
        return self._attention.refusal(shape)

    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepares the step."""
        self._attention.begin_step(batch)

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with a layer that has a norm."""
        norms = HeadNorms(query=HeadNorm(module=nn.RMSNorm(8), epsilon=1e-5))
        return self._attention.attend(PagedLayer(layer.shape, layer.cache, norms=norms), query, key, value)


@pytest.mark.parametrize(
    "attention",
    [SdpaAttention(4), CpuAttention(TorchKernels()), InvariantAttention()],
    ids=["sdpa", "cpu", "invariant"],
)
def test_backend_that_norms_no_heads_runs_no_layer_with_norms(attention: Attention) -> None:
    """Queries and keys would go without their norm, and the text be wrong without a word."""
    assert not attention.norms_heads
    with pytest.raises(AssertionError, match="must arrive normed"):
        attended(Expecting(attention), Case([(3, 1)], PLAIN, num_decode=1))


def test_norm_has_the_weight_that_the_module_has_now() -> None:
    """A trainer updates in place, or puts other memory or another parameter in its place."""
    module = nn.RMSNorm(4)
    norm = HeadNorm(module=module, epsilon=1e-5)
    with torch.no_grad():
        module.weight.mul_(2)
    assert norm.weight.tolist() == [2] * 4
    module.weight.data = torch.full((4,), 3.0)
    assert norm.weight.tolist() == [3] * 4
    module.weight = nn.Parameter(torch.full((4,), 5.0))
    assert norm.weight is module.weight


def test_layer_has_no_norms_unless_they_are_given() -> None:
    """Megatron's own path hands over what it has normed."""
    assert PagedLayer(PLAIN, LayerCache()).norms is None
