"""Parts that megatron has not, one by one; that Gemma 2 comes out right is in test_hf_families.py."""

from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from megallm.models.checkpoint import Hyperparameters
from megallm.models.extra_parts import JointNorm, add_parts
from tests.models.tiny_gguf import TINY


class Linear(nn.Module):
    """Gives its output and its bias apart, as megatron's linear layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Gives both."""
        return states @ self.weight.T, self.bias


def unscaled(logits: object) -> object:
    """Stands for megatron's own last step."""
    return logits


def small_model(**changes: Any) -> tuple[Any, Hyperparameters]:  # Any: fields of many types
    """Gives a model of one attention layer and one MLP layer, as a hybrid one has, with parts added."""
    size: Hyperparameters = msgspec.structs.replace(TINY, hidden_size=4, **changes)
    layers = [
        SimpleNamespace(self_attention=SimpleNamespace(linear_proj=Linear()), mlp=SimpleNamespace()),
        SimpleNamespace(self_attention=SimpleNamespace(), mlp=SimpleNamespace(linear_fc2=Linear())),
    ]
    model = SimpleNamespace(
        decoder=SimpleNamespace(layers=layers),
        embedding=nn.Embedding(3, 4),
        _scale_logits=unscaled,
    )
    add_parts(model, size)
    return model, size


def test_outputs_are_normed_with_their_bias_and_the_norm_is_a_parameter() -> None:
    """A norm of the sum without the bias is another model; a norm that is no parameter is never loaded."""
    model, size = small_model(has_output_norms=True)
    states = torch.randn(3, 4)
    for linear in (
        model.decoder.layers[0].self_attention.linear_proj,
        model.decoder.layers[1].mlp.linear_fc2,
    ):
        assert "output_norm.weight" in dict(linear.named_parameters())
        output, bias = linear(states)
        assert bias is None
        plain = states @ linear.weight.T + linear.bias
        torch.testing.assert_close(output, torch.rms_norm(plain, (4,), eps=size.norm_epsilon))


def test_the_embedding_s_factor_is_rounded_to_the_model_s_dtype() -> None:
    """In training it was a tensor of that dtype: 48.0 in bfloat16, where the root of 2,304 is."""
    model, _ = small_model(embedding_factor=2304**0.5 + 0.1)
    ids = torch.tensor([1])
    exact = model.embedding.weight[1:2] * (2304**0.5 + 0.1)
    torch.testing.assert_close(model.embedding(ids), exact)
    halved = model.embedding.to(torch.bfloat16)
    assert torch.equal(halved(ids), halved.weight[1:2] * 48)


def test_logits_stay_below_the_softcap() -> None:
    """And near zero as they are."""
    model, _ = small_model(logit_softcap=30.0)
    logits = model._scale_logits(torch.tensor([0.1, 1e6, -1e6]))  # noqa: SLF001 - megatron's name
    torch.testing.assert_close(logits, torch.tensor([0.1, 30.0, -30.0]), atol=1e-4, rtol=0)


def test_a_factor_on_logits_comes_before_the_softcap() -> None:
    """No family has both, and a bound is of what is sampled from."""
    model, _ = small_model(logit_factor=0.5)
    assert model._scale_logits(torch.tensor([3.0])).tolist() == [1.5]  # noqa: SLF001 - megatron's name
    model, _ = small_model(logit_factor=0.5, logit_softcap=2.0)
    bounded = model._scale_logits(torch.tensor([3.0, 1e6]))  # noqa: SLF001 - the same
    torch.testing.assert_close(bounded, 2 * torch.tensor([0.75, 1e6]).tanh())


def test_a_joint_norm_takes_all_heads_of_a_token_as_one_vector() -> None:
    """One by one, each head would lose how large it is beside the others."""
    norm = JointNorm(6, eps=1e-6)
    heads = torch.randn(5, 1, 3, 2)
    torch.testing.assert_close(norm(heads).flatten(-2), torch.rms_norm(heads.flatten(-2), (6,), eps=1e-6))
    joint = {"q_layernorm": None, "k_layernorm": None}
    size = msgspec.structs.replace(TINY, has_qk_norm=True, is_qk_norm_joint=True)
    attention = SimpleNamespace(**joint)
    add_parts(
        SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(self_attention=attention)])), size
    )
    shapes = [attention.q_layernorm.weight.numel(), attention.k_layernorm.weight.numel()]
    assert shapes == [size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim]


def test_a_model_of_none_of_them_is_left_as_it_was() -> None:
    """A hook costs a call at every step, and may keep a layer from its fast path."""
    model, _ = small_model()
    linear = model.decoder.layers[0].self_attention.linear_proj
    assert not linear._forward_hooks  # noqa: SLF001 - torch shows them no other way
    assert not model.embedding._forward_hooks  # noqa: SLF001 - the same
    assert model._scale_logits(5) == 5  # noqa: SLF001 - megatron's name
