"""The dense layer as one function, against megatron's own layer."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.dense_layer import (
    Attend,
    TorchOps,
    dense_layer,
    has_dense_options,
    head_norms_of,
)
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.model import ModelHook
from tests.device.conftest import built
from tests.device.models import Megatron, cpu_is_current, plain_attention

DENSE = ["grouped heads", "one kv head per head", "one kv head", "query and key norms, biases"]
OTHERS = ["mixture of experts", "latent attention", "hybrid"]


def layer_of(name: str) -> Megatron:
    """Gives the second layer of a small model."""
    return built(name).decoder.layers[1]


def hidden_of(num_tokens: int) -> Tensor:
    """Gives seeded hidden states, `[tokens, 1, hidden]`."""
    return torch.randn(num_tokens, 1, 64, generator=torch.Generator().manual_seed(num_tokens))


def whole_sequence_attention(layer: Megatron) -> Attend:
    """Gives the reference attention as `dense_layer` calls it."""
    core = layer.self_attention.core_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return core.forward(query.flatten(1, -2)[:, None], key[:, None], value[:, None])[:, 0]

    return attend


def refuse(*args: object, **kwargs: object) -> tuple[Tensor, None]:
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


def test_norms_of_heads_are_left_to_attention_that_norms() -> None:
    """Its queries and keys come as the projection gives them, so that they are normed once."""
    name, hidden = "query and key norms, biases", hidden_of(7)
    layer = layer_of(name)
    whole, norms = whole_sequence_attention(layer), head_norms_of(layer.self_attention)
    assert norms is not None
    assert norms.query is not None
    assert norms.key is not None
    query_norm, key_norm = norms.query.module, norms.key.module
    assert (query_norm, key_norm) == (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return whole(query_norm(query), key_norm(key), value)

    with torch.inference_mode(), plain_attention(built(name)), cpu_is_current():
        expected, _ = type(layer).forward(layer, hidden_states=hidden, attention_mask=None)
        forward = dense_layer(layer, attend, TorchOps(), refuse, attend_norms_heads=True)
        got, _ = forward(hidden, attention_mask=None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_head_norms_are_the_layers_own_and_none_where_it_has_none() -> None:
    """One of the two may be missing; an epsilon that torch chooses by the dtype is torch's to apply."""
    norm, without = nn.RMSNorm(8, eps=0.25), nn.Identity()

    def found(query: nn.Module | None, key: nn.Module | None) -> list[tuple[nn.Module, float] | None] | None:
        norms = head_norms_of(SimpleNamespace(q_layernorm=query, k_layernorm=key))
        if norms is None:
            return None
        return [one and (one.module, one.epsilon) for one in (norms.query, norms.key)]

    assert found(norm, None) == [(norm, 0.25), None]
    assert found(without, norm) == [None, (norm, 0.25)]
    assert found(norm, norm) == [(norm, 0.25)] * 2
    assert found(without, None) is None
    assert found(norm, nn.RMSNorm(8)) is None


def test_hook_registered_later_on_any_module_inside_is_honoured() -> None:
    """Activation capture may begin in the middle of a run."""
    layer, hidden = layer_of("grouped heads"), hidden_of(3)
    ran: list[str] = []

    def megatrons(hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
        ran.append("megatron")
        return hidden_states, None

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
    ("name", "num_fused"), [*((name, 3) for name in DENSE), *((name, 0) for name in OTHERS)]
)
def test_dense_layers_alone_run_as_one_function(name: str, num_fused: int) -> None:
    """What is not exactly such a layer stays megatron's."""
    model = built(name)
    hook = ModelHook(model)
    caches = [LayerCache() for _ in hook.shape.attention_layers]
    hook.bind(SdpaAttention(4), caches, TorchOps(), max_positions=32)
    fused = sum("forward" in vars(layer) for layer in model.decoder.layers)
    hook.unbind()
    assert fused == num_fused


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fp32_residual_connection", True),
        ("attention_output_gate", True),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("gated_linear_unit", False),
    ],
)
def test_option_that_the_function_leaves_out_keeps_the_layer_megatrons(
    monkeypatch: pytest.MonkeyPatch, option: str, value: object
) -> None:
    """Each changes the maths between the same modules."""
    layer = layer_of("grouped heads")
    assert has_dense_options(layer)
    monkeypatch.setattr(layer.config, option, value)
    assert not has_dense_options(layer)
