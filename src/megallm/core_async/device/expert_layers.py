"""Experts that several ranks hold together: which ranks, and how tokens reach them.

Reads the model's mixture-of-experts layers by attribute; imports no megatron. Experts are *spread* where
some of those ranks run other requests: ranks whose steps differ in tokens, or have none.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.nn import functional

from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads

GATHERED: Final = "allgather"
"""Every rank gets every token."""

SENT: Final = "alltoall"
"""Every rank gets the tokens that its experts are chosen for."""


class ExpertLayers:
    """The mixture-of-experts layers of this rank's model, in the order of the forward pass; changes nothing.

    Raises: UnsupportedModelError where experts are spread and an option is set that needs them not to be.
    """

    def __init__(self, model: MegatronModule) -> None:
        parts: list[MegatronModule] = [layer.mlp for layer in model.decoder.layers]
        self._layers = [part for part in parts if hasattr(part, "token_dispatcher") and _is_shared(part)]
        self.ranks = _ranks_of(layer.token_dispatcher.tp_ep_group for layer in self._layers)
        """The global ranks that hold the experts together; empty where this one has all of them, whole."""
        self.is_spread = not set(self.ranks) <= set(_ranks_of(layer.attn_tp_group for layer in self._layers))
        """Some of them run other requests: all of them take part in every step of each."""
        if self.is_spread:
            self._refuse_options()

    def run_without_tokens(self, dtype: torch.dtype, device: torch.device) -> None:
        """Runs this rank's experts on the tokens of the others, which run a step.

        Nothing else of a step without tokens computes anything, or is waited for.
        """
        for layer in self._layers:
            layer(torch.empty(0, 1, layer.config.hidden_size, dtype=dtype, device=device))

    def exchanges(self, device: torch.device) -> Iterator[tuple[MegatronModule, str, Callable[..., object]]]:
        """Yields what has to stand in place of megatron's own methods: module, name and method."""
        if not self.is_spread and device.type != "cpu":
            return
        for layer in self._layers:
            if layer.config.moe_token_dispatcher_type == GATHERED:
                dispatch, combine = gathering(layer.token_dispatcher, is_even=not self.is_spread)
                yield layer.token_dispatcher, "token_dispatch", dispatch
                yield layer.token_dispatcher, "token_combine", combine

    def _refuse_options(self) -> None:
        for layer in self._layers:
            config = layer.config
            refused = {
                f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}": (
                    config.moe_token_dispatcher_type not in (GATHERED, SENT),
                    f"build it with moe_token_dispatcher_type={SENT!r}",
                ),
                f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}": (
                    config.moe_expert_capacity_factor is not None,
                    "build it with moe_expert_capacity_factor=None: no token is dropped",
                ),
                # of no tokens they make tensors of another type, or nothing that is known
                "moe_permute_fusion": (config.moe_permute_fusion, "set it to False in the model's config"),
                "moe_router_fusion": (config.moe_router_fusion, "set it to False in the model's config"),
            }
            for option, (is_set, remedy) in refused.items():
                if is_set:
                    raise UnsupportedModelError(
                        f"the experts are spread over ranks {list(self.ranks)}, which run other requests, and"
                        f" the model has {option}, which needs as many tokens on each; {remedy}"
                    )


def gathering(
    dispatcher: MegatronModule, *, is_even: bool
) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]:
    """Gives a gathering dispatcher's `token_dispatch` and `token_combine` for any numbers of tokens.

    megatron's own are for ranks that have as many tokens each, and for CUDA: here every rank's are padded to
    the longest, with tokens that choose no expert. `is_even`: they are as many, and nobody need ask.
    """
    group = dispatcher.tp_ep_group
    num_ranks = distributed.get_world_size(group)

    def gathered(part: Tensor, num_tokens: int) -> Tensor:
        padded = functional.pad(part, (0, 0, 0, num_tokens - len(part)))
        whole = padded.new_empty(num_ranks * num_tokens, *part.shape[1:])
        distributed.all_gather(list(whole.split(num_tokens)), padded, group=group)
        return whole

    def token_dispatch(hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        longest = len(hidden) if is_even else _longest(hidden, group)
        dispatcher.routing_map = gathered(dispatcher.routing_map.byte(), longest).bool()
        return gathered(hidden, longest), gathered(probs, longest)

    def token_combine(partial: Tensor) -> Tensor:
        parts = list(partial.to(dispatcher.local_probs.dtype).chunk(num_ranks))
        summed = torch.empty_like(parts[0])
        distributed.reduce_scatter(summed, parts, group=group)
        return summed[: math.prod(dispatcher.hidden_shape[:-1])].to(partial.dtype)

    return token_dispatch, token_combine


def _is_shared(layer: MegatronModule) -> bool:
    num_ranks: int = layer.token_dispatcher.tp_size * layer.token_dispatcher.ep_size
    return num_ranks > 1


def _longest(hidden: Tensor, group: distributed.ProcessGroup) -> int:
    longest = torch.tensor(len(hidden), device=hidden.device)
    distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=group)
    return max(int(longest), 1)


def _ranks_of(groups: Iterable[distributed.ProcessGroup]) -> tuple[int, ...]:
    return tuple(sorted({rank for group in groups for rank in distributed.get_process_group_ranks(group)}))
