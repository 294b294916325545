"""What some of the model's modules do during a step: their own maths, without megatron's detours.

Takes modules as they are, by attribute, and their parameters at each call; imports no megatron.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def plain_linear(
    linear: MegatronModule, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Gives a parallel linear layer's forward for a group of one, by `product(rows, weight, bias)`.

    The bias is added or handed on, as the layer is made. Spares it an autograd function and collectives.
    """

    def forward(
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,  # noqa: FBT001 - megatron's signature
    ) -> tuple[Tensor, Tensor | None]:
        del runtime_gather_output
        matrix = linear.weight if weight is None else weight
        if linear.skip_bias_add:
            return product(input_, matrix, None), linear.bias
        return product(input_, matrix, linear.bias), None

    return forward


def router_gate(router: MegatronModule) -> Callable[[Tensor], Tensor]:
    """Gives an expert router's scores: of no tokens, too, and with weights that are on a CPU."""

    def gating(hidden: Tensor) -> Tensor:
        dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype, hidden.dtype)
        bias = None if router.bias is None else router.bias.to(dtype)
        return functional.linear(hidden.to(dtype), router.weight.to(dtype), bias)

    return gating
