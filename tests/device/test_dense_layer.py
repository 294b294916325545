"""The dense layer as one function, against megatron's own layer."""

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device.dense_layer import LayerOps, TorchOps, dense_layer
from tests.device.conftest import StartRunner, built
from tests.device.models import Megatron, cpu_is_current, plain_attention

DENSE = [
    "grouped heads",
    "one kv head per head",
    "one kv head",
    "query and key norms, biases",
    "no positions",
]
OTHERS = ["mixture of experts", "latent attention", "hybrid"]


class CountingOps(TorchOps):
    """Counts the products it computes."""

    def __init__(self) -> None:
        self.products = 0

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Counts one."""
        self.products += 1
        return super().linear(rows, weight, bias)


def layer_of(name: str) -> Megatron:
    """Gives the second layer of a small model."""
    return built(name).decoder.layers[1]


def hidden_of(num_tokens: int) -> Tensor:
    """Gives seeded hidden states, `[tokens, 1, hidden]`."""
    return torch.randn(num_tokens, 1, 64, generator=torch.Generator().manual_seed(num_tokens))


def whole_sequence_attention(layer: Megatron) -> object:
    """Gives the reference attention as `dense_layer` calls it."""
    core = layer.self_attention.core_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return core.forward(query[:, None], key[:, None], value[:, None])[:, 0]

    return attend


def refuse(*args: object, **kwargs: object) -> object:
    """Stands for megatron's forward where it must not run."""
    raise AssertionError("megatron's own forward ran")


@pytest.mark.parametrize("name", DENSE)
def test_layer_gives_what_megatrons_gives(name: str) -> None:
    """Norms, biases, the order of a group's heads and both residuals, to the last few bits."""
    layer, hidden = layer_of(name), hidden_of(7)
    kept = hidden.clone()
    with torch.inference_mode(), plain_attention(built(name)), cpu_is_current():
        expected, _ = type(layer).forward(layer, hidden_states=hidden, attention_mask=None)
        got, context = dense_layer(layer, whole_sequence_attention(layer), TorchOps(), refuse)(
            hidden, attention_mask=None
        )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert context is None
    assert hidden.equal(kept), "the caller's hidden states are its own"


def test_hook_registered_later_on_any_module_inside_is_honoured() -> None:
    """Activation capture may begin in the middle of a run."""
    layer, hidden = layer_of("grouped heads"), hidden_of(3)
    ran: list[str] = []

    def megatrons(**kwargs: object) -> object:
        ran.append("megatron")
        return kwargs["hidden_states"], None

    def capture(module: nn.Module, args: object) -> None:
        """Captures nothing."""

    with torch.inference_mode(), plain_attention(built("grouped heads")):
        forward = dense_layer(layer, whole_sequence_attention(layer), TorchOps(), megatrons)
        forward(hidden, attention_mask=None)
        assert ran == []
        handle = layer.mlp.linear_fc2.register_forward_pre_hook(capture)
        forward(hidden, attention_mask=None)
        assert ran == ["megatron"]
        handle.remove()
        forward(hidden, attention_mask=None)
    assert ran == ["megatron"]


@pytest.mark.parametrize(
    ("name", "products"), [*((name, 12) for name in DENSE), *((name, 0) for name in OTHERS)]
)
def test_dense_layers_alone_run_as_one_function(
    name: str, products: int, start: StartRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four products a layer; what is not exactly such a layer stays megatron's."""
    ops = CountingOps()

    def counting() -> LayerOps:
        return ops

    monkeypatch.setattr("megallm.core_async.device.runner.TorchOps", counting)
    planner = start(built(name))
    planner.decode(planner.add([1, 2, 3]), num_steps=1)
    assert ops.products == products


def test_sum_and_norm_leaves_the_residual_alone() -> None:
    """The residual may be what a user's hook kept."""
    rows, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    total, normed = TorchOps().add_rms_norm(rows.clone(), kept := residual.clone(), weight, 1e-5)
    assert kept.equal(residual)
    torch.testing.assert_close(total, rows + residual)
    expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(TorchOps().rms_norm(total, weight, 1e-5), expected)


def test_gate_is_silu_of_the_first_half() -> None:
    """The halves swapped would still look like numbers."""
    rows = torch.tensor([[0.0, 1.0, -2.0, 3.0, 4.0, 5.0]])
    silu = [value / (1 + torch.tensor(-value).exp()) for value in (0.0, 1.0, -2.0)]
    expected = torch.stack([silu[0] * 3, silu[1] * 4, silu[2] * 5])[None]
    torch.testing.assert_close(TorchOps().silu_gate(rows), expected)
