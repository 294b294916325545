"""Parts that megatron-core's own classes have not: norms in other places, a scaled embedding, other logits.

They are added to an instance as hooks and attributes, so that the model stays megatron's in every other
respect. Knows a model by attribute; imports no megatron.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megallm.models.checkpoint import Hyperparameters


def add_parts(model: Any, size: Hyperparameters) -> None:  # Any: megatron's model is untyped
    """Adds what `size` asks for to a new model, before it is moved to its device and dtype."""
    if size.has_output_norms:
        for layer in model.decoder.layers:
            for parent, name in ((layer.self_attention, "linear_proj"), (layer.mlp, "linear_fc2")):
                if hasattr(parent, name):  # a hybrid model's layers have one of the two
                    _norm_output(getattr(parent, name), size)
    if size.is_qk_norm_joint:
        for layer in model.decoder.layers:
            if hasattr(layer.self_attention, "q_layernorm"):  # the same
                _norm_jointly(layer.self_attention, size)
    if size.embedding_factor != 1.0 and hasattr(model, "embedding"):
        model.embedding.register_forward_hook(_scaled(size.embedding_factor))
    if size.logit_softcap is not None or size.logit_factor != 1.0:
        # the last thing that megatron does to logits; its own does nothing unless the model is trained for it
        model._scale_logits = _finished(size)  # noqa: SLF001 - there is no other seam


class JointNorm(nn.RMSNorm):
    """Norms all heads of a token as one vector: `[..., heads, head_dim]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Gives a new tensor."""
        return super().forward(x.flatten(-2)).view(x.shape)


def _norm_jointly(attention: Any, size: Hyperparameters) -> None:  # Any: the same
    for name, num_heads in (("q_layernorm", size.num_heads), ("k_layernorm", size.num_kv_heads)):
        setattr(attention, name, JointNorm(num_heads * size.head_dim, eps=size.norm_epsilon))


def _norm_output(linear: nn.Module, size: Hyperparameters) -> None:
    linear.output_norm = nn.RMSNorm(size.hidden_size, eps=size.norm_epsilon)
    linear.register_forward_hook(_normed)


def _normed(linear: Any, _args: object, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    states, bias = output
    return linear.output_norm(states if bias is None else states + bias), None


def _scaled(factor: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def scale(_module: nn.Module, _args: object, embedded: Tensor) -> Tensor:
        # the factor is rounded to the model's dtype, as in training; on the host, so that nothing waits
        return embedded * float(torch.tensor(factor, dtype=embedded.dtype))

    return scale


def _finished(size: Hyperparameters) -> Callable[[Tensor], Tensor]:
    softcap, factor = size.logit_softcap, size.logit_factor

    def finish(logits: Tensor) -> Tensor:
        scaled = logits if factor == 1.0 else logits * factor
        return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    return finish
