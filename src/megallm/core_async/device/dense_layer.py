"""A dense transformer layer as one function over packed tokens: seven products and norms, and attention.

The maths of megatron's layer in the same order, without the three dozen modules and context managers that
it passes through, which cost more than the products of a small model. Takes the layer's modules as they
are, by attribute, and their parameters at each call; imports no megatron.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from megallm.core_async.device.attention import HeadNorm, HeadNorms
from megallm.core_async.device.hooks import hooks_of

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads
type Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class LayerOps(Protocol):
    """The arithmetic of a layer on one kind of device; rows are tokens, `[tokens, width]`."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Lays a linear layer's weight out in place as `linear` likes it; gives how to take that back."""
        ...

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        ...

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`; may overwrite `residual`."""
        ...

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`; works over the last dimension."""
        ...

    def add_linear_norm(  # noqa: PLR0917 - a residual, a linear layer, a norm
        self,
        residual: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        epsilon: float,
        *,
        may_overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Gives `residual + rows @ weight.T + bias` and its norm.

        `may_overwrite`: nobody needs `residual` afterwards; else both inputs stay as they are.
        """
        ...

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of each row's first half, times the second."""
        ...


class TorchOps:
    """The same by torch's own functions, on any device."""

    def prepare(self, weight: nn.Parameter) -> Callable[[], object] | None:
        """Leaves the weight as it is."""
        del weight
        return None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `rows @ weight.T + bias`."""
        return functional.linear(rows, weight, bias)

    def add_linear(self, residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives `residual + rows @ weight.T + bias`."""
        return functional.linear(rows, weight, bias).add_(residual)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        return torch.rms_norm(rows, weight.shape, weight, epsilon)

    def add_rms_norm(
        self, rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Gives `rows + residual`, in the place of `rows`, and its norm."""
        rows.add_(residual)
        return rows, torch.rms_norm(rows, weight.shape, weight, epsilon)

    def silu_gate(self, rows: Tensor) -> Tensor:
        """Gives SiLU of the first half of each row, times the second half."""
        gate, up = rows.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def add_linear_norm(  # noqa: PLR0917 - a residual, a linear layer, a norm
        self,
        residual: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        epsilon: float,
        *,
        may_overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Gives `residual + rows @ weight.T + bias` and its norm."""
        del may_overwrite
        return self.add_rms_norm(self.linear(rows, weight, bias), residual, norm_weight, epsilon)

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of `rows @ weight.T + bias`: SiLU of the first half, times the second."""
        return self.silu_gate(self.linear(rows, weight, bias))


class NextNorm:
    """What a layer or the model's last norm norms first, normed: by the layer before it, with the sum itself.

    One for all layers of a model. Holds at most one pair; nobody else sees it.
    """

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self._normed: Tensor | None = None

    def put(self, hidden: Tensor, normed: Tensor) -> None:
        """Keeps the norm, `[tokens, width]`, of what a layer is about to return, `[tokens, 1, width]`."""
        self._hidden, self._normed = hidden, normed

    def take(self, hidden: Tensor) -> Tensor | None:
        """Gives the norm of that very tensor; None where something came between."""
        normed = self._normed if self._hidden is hidden else None
        self._hidden = self._normed = None
        return normed


def dense_layer(
    layer: MegatronModule,
    attend: Attend,
    ops: LayerOps,
    megatrons: Callable[..., tuple[Tensor, None]],
    *,
    following: MegatronModule | None = None,
    next_norm: NextNorm | None = None,
    attend_norms_heads: bool = False,
    wanted: Callable[[], Tensor | None] | None = None,
) -> Callable[..., tuple[Tensor, None]]:
    """Gives a layer's forward over `[tokens, 1, hidden]`, as a step needs it.

    `megatrons` is the layer's own forward: it runs where somebody hooked a module inside the layer.
    `following` takes the layer's output, if it is such a layer too or the model's last norm: its first norm
    is then made here, with the sum that it is of, and goes through `next_norm`; but not past a hook of either
    module, which may change the sum where it is. `attend_norms_heads`: `attend` takes queries and keys as
    the projection gives them, and norms them itself. `wanted` gives the tokens that the layer's output is to
    have, where it is not to have all.
    """
    carried = NextNorm() if next_norm is None else next_norm
    attention, mlp = layer.self_attention, layer.mlp
    hooks = hooks_of(module for module in layer.modules() if module is not layer)
    hooks_between = [] if following is None else hooks_of((layer, following))
    attention_ranks, mlp_ranks = _sharers(attention.linear_proj), _sharers(mlp.linear_fc2)
    num_groups: int = attention.num_query_groups_per_partition
    head_dim: int = attention.hidden_size_per_attention_head
    query_norm, key_norm = (None, None) if attend_norms_heads else _head_norms(attention)

    def forward(hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
        if any(hooks):
            return megatrons(hidden_states=hidden_states, **others)
        hidden = hidden_states[:, 0]
        normed = carried.take(hidden_states)
        if normed is None:
            normed = _norm(ops, layer.input_layernorm, hidden)
        # one group's query heads, then its key and its value: `[tokens, groups, heads + 2, head_dim]`
        mixed = _linear(ops, attention.linear_qkv, normed).view(len(hidden), num_groups, -1, head_dim)
        query, key, value = mixed[:, :, :-2], mixed[:, :, -2], mixed[:, :, -1]
        if query_norm is not None:
            query = _norm(ops, query_norm, query.flatten(1, 2))
        if key_norm is not None:
            key = _norm(ops, key_norm, key)
        attended = attend(query, key, value)
        if wanted is not None and (tokens := wanted()) is not None:
            hidden, attended = hidden.index_select(0, tokens), attended.index_select(0, tokens)
        hidden, normed = _add_linear_norm(
            ops, hidden, attended, attention.linear_proj, layer.pre_mlp_layernorm, attention_ranks
        )
        gated = ops.gated_linear(normed, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
        if following is None or any(hooks_between):
            return _add_linear(ops, hidden, gated, mlp.linear_fc2, mlp_ranks)[:, None], None
        output, normed = _add_linear_norm(
            ops, hidden, gated, mlp.linear_fc2, _first_norm(following), mlp_ranks, may_overwrite=True
        )
        output = output[:, None]
        carried.put(output, normed)
        return output, None

    return forward


def head_norms_of(attention: MegatronModule) -> HeadNorms | None:
    """Gives the norms of a layer's queries and keys as a backend takes them over; None where it can't."""
    norms = _head_norms(attention)
    query, key = map(_known_norm, norms)
    is_known = (query is None) == (norms[0] is None) and (key is None) == (norms[1] is None)
    return HeadNorms(query=query, key=key) if is_known and (query or key) else None


def _known_norm(norm: nn.RMSNorm | None) -> HeadNorm | None:
    return None if norm is None or norm.eps is None else HeadNorm(module=norm, epsilon=norm.eps)


def has_dense_options(layer: MegatronModule) -> bool:
    """Says whether a layer of the right modules has none of the options that `dense_layer` leaves out."""
    config = layer.config
    leaves_out = (
        config.fp32_residual_connection
        or config.attention_output_gate
        or config.use_te_activation_func
        or config.activation_func_clamp_value is not None
        or config.glu_linear_offset != 0
    )
    return config.gated_linear_unit and layer.mlp.activation_func is functional.silu and not leaves_out


def _head_norms(attention: MegatronModule) -> tuple[nn.RMSNorm | None, nn.RMSNorm | None]:
    return _norm_or_none(attention.q_layernorm), _norm_or_none(attention.k_layernorm)


def _norm_or_none(norm: MegatronModule) -> nn.RMSNorm | None:
    return norm if isinstance(norm, nn.RMSNorm) else None


def _first_norm(following: MegatronModule) -> nn.RMSNorm:
    return following if isinstance(following, nn.RMSNorm) else following.input_layernorm


def _norm(ops: LayerOps, norm: MegatronModule, rows: Tensor) -> Tensor:
    return ops.rms_norm(rows, norm.weight, norm.eps)


def _sharers(linear: MegatronModule) -> distributed.ProcessGroup | None:
    """Gives the ranks that hold a part of a row-parallel layer each; None where this one has all of it."""
    group: distributed.ProcessGroup | None = linear.tp_group
    return None if group is None or group.size() == 1 else group


def _add_linear(
    ops: LayerOps,
    residual: Tensor,
    rows: Tensor,
    linear: MegatronModule,
    sharers: distributed.ProcessGroup | None,
) -> Tensor:
    """Gives `residual + rows @ weight.T + bias`, the product being the sum of all ranks' parts."""
    if sharers is None:
        return ops.add_linear(residual, rows, linear.weight, linear.bias)
    output = ops.linear(rows, linear.weight, None)
    distributed.all_reduce(output, group=sharers)
    output.add_(residual)
    return output if linear.bias is None else output.add_(linear.bias)


def _add_linear_norm(  # noqa: PLR0917 - a residual, a linear layer, a norm
    ops: LayerOps,
    residual: Tensor,
    rows: Tensor,
    linear: MegatronModule,
    norm: MegatronModule,
    sharers: distributed.ProcessGroup | None,
    *,
    may_overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gives the same, and its norm; `may_overwrite` as `LayerOps.add_linear_norm`."""
    if sharers is None:
        return ops.add_linear_norm(
            residual, rows, linear.weight, linear.bias, norm.weight, norm.eps, may_overwrite=may_overwrite
        )
    output = _add_linear(ops, residual, rows, linear, sharers)
    return output, _norm(ops, norm, output)


def _linear(ops: LayerOps, linear: MegatronModule, rows: Tensor) -> Tensor:
    return ops.linear(rows, linear.weight, linear.bias)
