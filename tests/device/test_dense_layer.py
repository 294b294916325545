"""The dense layer as one function, against megatron's own layer."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.dense_layer import (
    Attend,
    NextNorm,
    TorchOps,
    dense_layer,
    has_dense_options,
    head_norms_of,
)
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.model import ModelHook
from tests.device.conftest import built
from tests.device.models import Megatron, cpu_is_current, plain_attention, plain_continuation, plain_logits
from tests.device.test_model import allocated_caches, continuation

DENSE = ["grouped heads", "one kv head per head", "one kv head", "query and key norms, biases"]
OTHERS = ["mixture of experts", "latent attention", "hybrid"]
PROMPT = [3, 1, 4, 1, 5]


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


class NormingOps(TorchOps):
    """torch's arithmetic, which keeps whose norms were made, by their weights' places in memory."""

    def __init__(self) -> None:
        self.alone: list[int] = []
        self.with_sums: list[int] = []

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        self.alone.append(weight.data_ptr())
        return super().rms_norm(rows, weight, epsilon)

    def add_rms_norm(
        self, rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Gives `rows + residual`, in the place of `rows`, and its norm."""
        self.with_sums.append(weight.data_ptr())
        return super().add_rms_norm(rows, residual, weight, epsilon)


@contextmanager
def bound(model: Megatron) -> Generator[tuple[NormingOps, Callable[[], Tensor]]]:
    """Binds a model; gives its ops, and what gives the logits of a prompt and five greedy steps."""
    hook, ops, backend = ModelHook(model), NormingOps(), SdpaAttention(4)
    caches = allocated_caches(hook)
    hook.bind(backend, caches.layers, ops, max_positions=32)
    try:
        yield ops, lambda: continuation(hook, backend, PROMPT)
    finally:
        hook.unbind()


def plain_steps(model: Megatron) -> Tensor:
    """Gives the same logits by plain forward passes."""
    greedy = plain_continuation(model, PROMPT, 6)
    return plain_logits(model, PROMPT + greedy[:-1])[len(PROMPT) - 1 :]


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


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("is_last", [False, True])
def test_norm_made_with_the_sum_is_the_one_that_the_next_module_would_make(
    name: str, *, is_last: bool
) -> None:
    """To the bit: of the next layer's first norm, and of the model's last."""
    decoder, hidden, carried = built(name).decoder, hidden_of(7), NextNorm()
    layer = decoder.layers[-1 if is_last else 1]
    following = decoder.final_layernorm if is_last else decoder.layers[2]
    norm = following if is_last else following.input_layernorm
    attend = whole_sequence_attention(layer)
    with torch.inference_mode(), plain_attention(built(name)):
        alone, _ = dense_layer(layer, attend, TorchOps(), refuse, next_norm=carried)(hidden)
        assert carried.take(alone) is None
        forward = dense_layer(layer, attend, TorchOps(), refuse, following=following, next_norm=carried)
        output, _ = forward(hidden)
        assert carried.take(output.clone()) is None, "of another tensor"
        output, _ = forward(hidden)
        normed = carried.take(output)
        assert normed is not None
        assert output.equal(alone)
        assert normed[:, None].equal(norm(output))
    assert carried.take(output) is None, "it is taken once"


def see_nothing(module: nn.Module, args: object) -> None:
    """Hooks a module, and does nothing."""


@pytest.mark.parametrize("watched", ["layers.2", "final_layernorm"])
def test_no_norm_is_made_past_a_hook(watched: str) -> None:
    """It may change the sum where it is, before the norm; it may come and go in the middle of a run."""
    decoder, hidden, carried = built("grouped heads").decoder, hidden_of(3), NextNorm()
    layer = decoder.layers[2]
    with torch.inference_mode(), plain_attention(built("grouped heads")):
        forward = dense_layer(
            layer,
            whole_sequence_attention(layer),
            TorchOps(),
            refuse,
            following=decoder.final_layernorm,
            next_norm=carried,
        )
        assert carried.take(forward(hidden)[0]) is not None
        handle = decoder.get_submodule(watched).register_forward_pre_hook(see_nothing)
        assert carried.take(forward(hidden)[0]) is None
        handle.remove()
        assert carried.take(forward(hidden)[0]) is not None


@pytest.mark.parametrize("watched", ["decoder.layers.1", "decoder.layers.2", "decoder.final_layernorm"])
def test_states_that_a_hook_changes_in_place_are_what_is_normed(watched: str) -> None:
    """Steering adds to a layer's output, often where it is: a norm made before would be of something else."""
    model = built("grouped heads")

    def steer_output(module: nn.Module, args: object, out: tuple[Tensor, None]) -> None:
        out[0][..., 0].add_(3)

    def steer_input(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0][..., 0].add_(3)

    module = model.get_submodule(watched)
    handle = (
        module.register_forward_pre_hook(steer_input)
        if module is model.decoder.final_layernorm
        else module.register_forward_hook(steer_output)
    )
    try:
        with bound(model) as (_, steps):
            logits = steps()
        expected = plain_steps(model)
    finally:
        handle.remove()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(plain_steps(model), expected, atol=1e-2)


def test_all_norms_but_a_steps_first_are_made_with_a_sum() -> None:
    """The model's last as well; and all read their weights at each step, which a trainer changes."""
    model = built("grouped heads")
    layers, weight = model.decoder.layers, model.decoder.final_layernorm.weight
    kept = weight.data.clone()
    first, *inner = [norm for layer in layers for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)]
    with_sums = [*(norm.weight.data_ptr() for norm in inner), weight.data_ptr()]
    with bound(model) as (ops, steps):
        before = steps()
        assert (ops.alone, ops.with_sums) == ([first.weight.data_ptr()] * 6, with_sums * 6)
        try:
            weight.data.copy_(kept.flip(0))
            after, expected = steps(), plain_steps(model)
        finally:
            weight.data.copy_(kept)
    torch.testing.assert_close(before, plain_steps(model), rtol=0, atol=1e-5)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-2)


class DoubledNorm(nn.RMSNorm):
    """Is no RMSNorm, whatever it inherits."""

    def forward(self, x: Tensor) -> Tensor:
        """Gives twice the norm."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("last", [None, DoubledNorm(64, eps=1e-5), nn.RMSNorm(64), nn.LayerNorm(64)])
def test_last_norm_that_is_not_known_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, last: nn.Module | None
) -> None:
    """A model may have none, or one of its own; torch chooses an epsilon by the dtype where none is named."""
    model = built("grouped heads")
    if last is not None:
        last.eval().requires_grad_(False)
    monkeypatch.setitem(model.decoder._modules, "final_layernorm", last)  # noqa: SLF001 - put back afterwards
    with bound(model) as (ops, steps):
        logits = steps()
        assert (len(ops.alone), len(ops.with_sums)) == (6, 6 * 5)
        assert last is None or "forward" not in vars(last)
    torch.testing.assert_close(logits, plain_steps(model), rtol=1e-5, atol=1e-5)


def test_hook_registered_later_on_any_module_inside_is_honoured() -> None:
    """Activation capture may begin in the middle of a run."""
    layer, hidden = layer_of("grouped heads"), hidden_of(3)
    ran: list[str] = []

    def megatrons(hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
        ran.append("megatron")
        return hidden_states, None

    with torch.inference_mode(), plain_attention(built("grouped heads")):
        forward = dense_layer(layer, whole_sequence_attention(layer), TorchOps(), megatrons)
        forward(hidden, attention_mask=None)
        assert ran == []
        handle = layer.mlp.linear_fc2.register_forward_pre_hook(see_nothing)
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
