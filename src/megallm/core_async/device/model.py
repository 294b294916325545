"""The hook into the user's megatron-core model: the only file that imports megatron's modules.

Examines the model's layers, puts paged attention and once-a-step rotary positions in their place, and takes
everything back. All changes are attributes of instances: no module is replaced and no parameter copied, so
names, state dict and in-place weight updates stay the user's throughout; and outside a step every one of
them hands on to megatron's own code, so that a trainer may run the bound model between two steps.
Knows megatron's modules; knows no plan, no request, no kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import get_pg_size
from msgspec import Struct
from torch import Tensor, nn

from megallm.core_async.device.attention import Attention, LayerShape, PagedLayer
from megallm.core_async.device.dense_layer import LayerOps, NextNorm, dense_layer, has_dense_options
from megallm.core_async.device.forwards import plain_linear, router_gate
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.layer_shapes import (
    latent_attention_shape,
    self_attention_shape,
    sinks_of,
    window_of,
)
from megallm.core_async.device.model_options import SUPPORTED, refuse_options, unwrapped
from megallm.core_async.device.rope import RopeTable, table_of
from megallm.core_async.device.rope_angles import angles_of
from megallm.core_async.device.step_inputs import StepInputs
from megallm.core_async.device.swaps import Swaps
from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file is about

_CORES = {"DotProductAttention", "TEDotProductAttention"}  # by name: the second needs Transformer Engine
_CAUSAL = {AttnMaskType.causal, AttnMaskType.padding_causal}


SCORED_AT_ONCE = 256
"""Tokens whose logits are computed at once where a prompt is scored."""


class ModelShape(Struct, frozen=True):
    """What the rest of the engine has to know of the model on this rank."""

    attention_layers: list[LayerShape]
    """In the order of the forward pass; layers without attention have no entry."""
    num_layers: int
    vocab_size: int
    max_positions: int | None
    """How many positions the model has learned; None where positions have no end."""
    dtype: torch.dtype
    device: torch.device


class _AttentionSite(Struct, frozen=True, eq=False):
    """An attention layer of the user's model."""

    layer: MegatronModule
    attention: MegatronModule
    shape: LayerShape


class _Step(Struct, eq=False):
    """What the bound modules look up while one forward pass runs."""

    inputs: StepInputs
    angles: dict[int, Tensor]
    """Rows gathered from an angle table, by the table's id."""
    scored_states: Tensor | None = None
    """`[scored tokens, 1, hidden]`, as the output layer takes them."""
    output_options: dict[str, Any] = {}
    """What the model gave the output layer beside the states."""
    is_scoring: bool = False


class ModelHook:
    """One model's hook. Construction examines and changes nothing; `bind` and `unbind` may alternate.

    Raises: UnsupportedModelError, naming the layer or option and what is supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: MegatronModule = unwrapped(model)
        refuse_options(self._model)
        self._sites = list(_attention_sites(self._model))
        learned = getattr(self._model.embedding, "position_embeddings", None)
        self.shape = ModelShape(
            attention_layers=[site.shape for site in self._sites],
            num_layers=len(self._model.decoder.layers),
            vocab_size=self._model.vocab_size,
            max_positions=None if learned is None else learned.num_embeddings,
            dtype=self._model.config.params_dtype,
            device=next(self._model.parameters()).device,
        )
        self.is_dense = len(self._sites) == self.shape.num_layers and all(
            _is_dense(site.layer) for site in self._sites
        )
        """Every layer runs as one function of its own: nothing in it asks the device for a number."""
        self.rope: RopeTable | None = None
        """What the attention backend turns by, while bound; None where it has nothing to turn."""
        self._swaps = Swaps()
        self._step: _Step | None = None

    def bind(
        self, attention: Attention, caches: Sequence[LayerCache], ops: LayerOps, *, max_positions: int
    ) -> None:
        """Puts `attention` on the model, one cache per attention layer; undone if anything fails.

        Dense layers of one rank run as one function each, on `ops`.
        """
        assert not any(module.training for module in self._model.modules()), "the model is in training mode"
        try:
            self._bind_rotary(max_positions)
            self._bind_detours(ops)
            next_norm = NextNorm()
            for site, cache in zip(self._sites, caches, strict=True):
                self._bind_attention(attention, site, cache, ops, next_norm)
            handle = self._model.output_layer.register_forward_pre_hook(
                self._only_rows_with_logits, with_kwargs=True
            )
            self._swaps.on_undo(handle.remove)
        except BaseException:
            self.unbind()
            raise

    def unbind(self) -> None:
        """Gives the user's model back exactly as it was; a second call finds nothing to do."""
        self.rope = None
        self._swaps.undo()

    def forward(self, inputs: StepInputs, score: Callable[[Tensor, int], None]) -> Tensor:
        """Runs the model over one step's packed tokens; gives the sampled tokens' logits, `[samples, vocab]`.

        The scored tokens' logits go to `score` in parts, with the number of those before: all of a long
        prompt's at once would take gigabytes.
        """
        step = self._step = _Step(inputs=inputs, angles={})
        try:
            logits = self._model(
                inputs.token_ids[None], inputs.batch.positions[None], None, runtime_gather_output=True
            )
            self._score(step, score)
        finally:
            self._step = None
        return logits[0]

    def _score(self, step: _Step, score: Callable[[Tensor, int], None]) -> None:
        if step.scored_states is None:
            return
        step.is_scoring = True
        first = 0
        for states in step.scored_states.split(SCORED_AT_ONCE):
            logits, _ = self._model.output_layer(states, **step.output_options)
            score(self._model._scale_logits(logits)[:, 0], first)  # noqa: SLF001 - the model's own last step
            first += len(states)

    def _swap(self, module: MegatronModule, name: str, while_stepping: Callable[..., object]) -> None:
        """Makes `module.name` do something else during a step."""
        original = getattr(module, name)

        def swapped(*args: object, **kwargs: object) -> object:
            return (original if self._step is None else while_stepping)(*args, **kwargs)

        self._swaps.set(module, name, swapped)

    def _bind_attention(
        self,
        attention: Attention,
        site: _AttentionSite,
        cache: LayerCache,
        ops: LayerOps,
        next_norm: NextNorm,
    ) -> None:
        sinks = sinks_of(site.attention, site.shape)
        attend = partial(attention.attend, PagedLayer(shape=site.shape, cache=cache, sinks=sinks))

        def forward(
            query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_ignored: object
        ) -> Tensor:
            return attend(query[:, 0], key[:, 0], value[:, 0])[:, None]

        self._swap(site.attention.core_attention, "forward", forward)
        if _is_dense(site.layer):
            forward = dense_layer(
                site.layer,
                attend,
                ops,
                site.layer.forward,
                following=self._dense_after(site.layer),
                next_norm=next_norm,
            )
            self._swap(site.layer, "forward", forward)

    def _dense_after(self, layer: MegatronModule) -> MegatronModule | None:
        """Gives the layer after one, where that is dense too."""
        layers = list(self._model.decoder.layers)
        following = layers[layers.index(layer) + 1 :][:1]
        return following[0] if following and _is_dense(following[0]) else None

    def _bind_rotary(self, max_positions: int) -> None:
        """Gives every rotary module one row per token; or None, where the backend turns instead."""
        rotary = getattr(self._model, "rotary_pos_emb", None)
        if rotary is not None:
            angles, mscale = angles_of(rotary, max_positions, self.shape.device)
            if _has_rope_to_turn(self._model):
                self.rope = table_of(
                    angles[:, 0, 0],
                    factor=self._sites[0].attention._yarn_concentration_factor if self._sites else 1.0,  # noqa: SLF001 - megatron keeps it nowhere else
                    is_interleaved=self._model.config.rotary_interleaved,
                    dtype=self.shape.dtype,
                )
                angles = None
            self._bind_rotary_forward(rotary, angles, mscale)
        tables: list[Tensor] = []
        for site in self._sites:
            own = getattr(site.attention, "rotary_pos_emb", None)
            if own is not None:
                angles, mscale = angles_of(own, max_positions, self.shape.device)
                # layers turn alike: one table, and one gather a step
                angles = next((table for table in tables if torch.equal(table, angles)), angles)
                tables.append(angles)
                self._bind_rotary_forward(own, angles, mscale)

    def _bind_rotary_forward(
        self, rotary: MegatronModule, angles: Tensor | None, mscale: float | None
    ) -> None:
        def forward(*_unused: object, **_ignored: object) -> object:
            rows = None if angles is None else self._rows_of(angles)
            return rows if mscale is None else (rows, mscale)

        self._swap(rotary, "forward", forward)
        self._swap(rotary, "get_rotary_seq_len", lambda *_unused, **_ignored: 0)

    def _rows_of(self, angles: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "angles are asked for outside a step"
        rows = step.angles.get(id(angles))
        if rows is None:
            rows = step.angles[id(angles)] = angles.index_select(0, step.inputs.batch.positions)
        return rows

    def _bind_detours(self, ops: LayerOps) -> None:
        """Spares modules what megatron does for gradients, for groups of one, and for CUDA."""
        for module in self._model.modules():
            if _is_plain_linear(module):
                self._swap(module, "forward", plain_linear(module, ops.linear))
                self._prepare(module, ops)
            elif isinstance(module, Router) and self.shape.device.type == "cpu":
                self._swap(module, "gating", router_gate(module))

    def _prepare(self, linear: MegatronModule, ops: LayerOps) -> None:
        """Lays a layer's own weight out for `ops`; never an embedding's, whose rows are looked up."""
        if linear.weight is not None and linear.weight is not self._model.embedding.word_embeddings.weight:
            take_back = ops.prepare(linear.weight)
            if take_back is not None:
                self._swaps.on_undo(take_back)

    def _only_rows_with_logits(
        self, _module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        """Leaves the output layer the sampled tokens' hidden states, of `[tokens, 1, hidden]`."""
        step = self._step
        if step is None or step.is_scoring:
            return None
        inputs, states = step.inputs, args[0]
        if inputs.scored_tokens is not None:
            step.scored_states = states.index_select(0, inputs.scored_tokens)
            step.output_options = options
        if inputs.logit_tokens is not None:
            states = states.index_select(0, inputs.logit_tokens)
        return (states, *args[1:]), options


def _attention_sites(model: MegatronModule) -> Iterator[_AttentionSite]:
    """Yields the attention layers in order; refuses the first layer that is not known."""
    for index, layer in enumerate(model.decoder.layers):
        name = f"decoder.layers.{index}"
        if not isinstance(layer, TransformerLayer):
            raise UnsupportedModelError(f"{name} is a {type(layer).__name__}; {SUPPORTED}")
        parts: MegatronModule = layer
        if not isinstance(parts.cross_attention, IdentityOp):
            raise UnsupportedModelError(f"{name} has a {type(parts.cross_attention).__name__}; {SUPPORTED}")
        attention: MegatronModule = parts.self_attention
        if isinstance(attention, IdentityOp):
            continue
        adapter = next((adapt for known, adapt in _ADAPTERS.items() if isinstance(attention, known)), None)
        if adapter is None:
            raise UnsupportedModelError(f"{name} has a {type(attention).__name__}; {SUPPORTED}")
        core = attention.core_attention
        if not _CORES & {base.__name__ for base in type(core).__mro__}:
            raise UnsupportedModelError(
                f"{name}.self_attention.core_attention is a {type(core).__name__}, unknown to the engine; "
                f"supported are {', '.join(sorted(_CORES))}"
            )
        if attention.attn_mask_type not in _CAUSAL:
            raise UnsupportedModelError(
                f"{name} attends with mask {attention.attn_mask_type.name}; {SUPPORTED}"
            )
        config = model.config
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, attention.layer_number
        )
        window = window_of(config, name) if is_windowed else None
        shape = adapter(config, attention, window=window, has_rope=_has_rope_to_turn(model))
        yield _AttentionSite(layer=parts, attention=attention, shape=shape)


_ADAPTERS: dict[type, Callable[..., LayerShape]] = {
    MLASelfAttention: latent_attention_shape,
    SelfAttention: self_attention_shape,
}


def _has_rope_to_turn(model: MegatronModule) -> bool:
    """Says whether the attention backend turns in megatron's stead.

    Not where megatron insists on its own fused kernel, nor for a rotary module of an unknown kind.
    """
    known = type(getattr(model, "rotary_pos_emb", None)) in (RotaryEmbedding, YarnRotaryEmbedding)
    return known and not model.config.fused_single_qkv_rope


def _is_dense(layer: MegatronModule) -> bool:
    """Says whether a layer is what `dense_layer` computes, and nothing more."""
    attention, mlp = layer.self_attention, layer.mlp
    norms = {type(layer.input_layernorm), type(layer.pre_mlp_layernorm)}
    if (type(layer), type(attention), type(mlp), norms) != (
        TransformerLayer,
        SelfAttention,
        MLP,
        {nn.RMSNorm},
    ):
        return False
    head_norms = {type(attention.q_layernorm), type(attention.k_layernorm)}
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return (
        head_norms <= {nn.RMSNorm, IdentityOp, type(None)}
        and has_dense_options(layer)
        and all(map(_is_plain_linear, linears))
    )


def _is_plain_linear(module: nn.Module) -> bool:
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return False
    linear: MegatronModule = module
    return (
        get_pg_size(linear.tp_group) == 1
        and linear.gtp_remat_size == 1
        and not linear.config.defer_embedding_wgrad_compute
    )
