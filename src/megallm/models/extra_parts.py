"""Parts that megatron-core's own classes have not: output norms, a scaled embedding, bounded logits.

They are added to an instance as hooks and one attribute, so that the model stays megatron's in every other
respect. Gemma 2 has all three. Knows a model by attribute; imports no megatron.
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
    if size.embedding_factor != 1.0:
        model.embedding.register_forward_hook(_scaled(size.embedding_factor))
    if size.logit_softcap is not None:
        # the last thing that megatron does to logits; its own does nothing unless the model is trained for it
        model._scale_logits = _bounded(size.logit_softcap)  # noqa: SLF001 - there is no other seam


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


def _bounded(softcap: float) -> Callable[[Tensor], Tensor]:
    def bound(logits: Tensor) -> Tensor:
        return softcap * torch.tanh(logits / softcap)

    return bound
