"""The hook into the user's megatron-core model: with attention_sites.py all that imports its modules.

Examines the model's layers, puts paged attention and once-a-step rotary positions in their place, and takes
everything back. All changes are attributes of instances: no module is replaced and no parameter copied, so
names, state dict and in-place weight updates stay the user's throughout; and outside a step every one of
them hands on to megatron's own code, so that a trainer may run the bound model between two steps.
Knows megatron's modules; knows no plan, no request, no kernel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import get_pg_size
from msgspec import Struct, structs
from torch import Tensor, nn

from megallm.core_async.device.attention import Attention, PagedLayer
from megallm.core_async.device.attention_sites import (
    AttentionSite,
    attention_sites,
    has_rope_to_turn,
    is_dense_layer,
    is_plain_linear,
    is_sliced_linear,
)
from megallm.core_async.device.dense_layer import LayerOps, NextNorm, dense_layer, head_norms_of
from megallm.core_async.device.expert_layers import ExpertLayers
from megallm.core_async.device.forwards import plain_linear, router_gate
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.layer_shapes import ModelShape, sinks_of, weights_of_layer
from megallm.core_async.device.model_options import device_of, refuse_options, unwrapped
from megallm.core_async.device.rank_group import gathered_logits
from megallm.core_async.device.rope import RopeTable, table_of
from megallm.core_async.device.rope_angles import angles_of
from megallm.core_async.device.sequence_parallel import SequenceParallel
from megallm.core_async.device.step_inputs import StepInputs
from megallm.core_async.device.swaps import Swaps
from megallm.core_async.device.wanted_rows import WantedRows
from megallm.core_async.errors import LifecycleError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file is about

SCORED_AT_ONCE = 256
"""Tokens whose logits are computed at once where a prompt is scored."""


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
    has_only_wanted: bool = False
    """The last layer gave the states of the tokens with logits alone."""


class ModelHook:
    """One model's hook. Construction examines and changes nothing; `bind` and `unbind` may alternate.

    Raises: UnsupportedModelError, naming the layer or option and what is supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: MegatronModule = unwrapped(model)
        refuse_options(self._model)
        self._sites = list(attention_sites(self._model))
        # a stage of a pipeline has its own layers; the first has the embedding, the last the output layer
        self._embedding: MegatronModule = getattr(self._model, "embedding", None)
        self._output_layer: MegatronModule = getattr(self._model, "output_layer", None)
        learned = getattr(self._embedding, "position_embeddings", None)
        self.shape = ModelShape(
            attention_layers=[site.shape for site in self._sites],
            num_layers=len(self._model.decoder.layers),
            layer_weights=weights_of_layer(self._model.decoder.layers),
            vocab_size=self._model.vocab_size,
            max_positions=None if learned is None else learned.num_embeddings,
            dtype=self._model.config.params_dtype,
            device=device_of(self._model),
        )
        self.is_dense = len(self._sites) == self.shape.num_layers and all(
            is_dense_layer(site.layer) for site in self._sites
        )
        """Every layer runs as one function of its own: nothing in it asks the device for a number."""
        self.is_whole = all(map(is_plain_linear, filter(is_sliced_linear, self._model.modules())))
        """This rank has all of every layer that it has a part of."""
        self.experts = ExpertLayers(self._model)
        self.rope: RopeTable | None = None
        """What the attention backend turns by, while bound; None where it has nothing to turn."""
        vocab_group = getattr(self._output_layer, "tp_group", None)
        self._vocab_group = vocab_group if get_pg_size(vocab_group) > 1 else None
        """The ranks that hold a part of the vocabulary each."""
        decoder = self._model.decoder
        last_norm = getattr(decoder, "final_layernorm", None) or getattr(decoder, "final_norm", None)
        self._wanted_rows = WantedRows([*decoder.layers[-1:], last_norm, decoder])
        self._sequence_parallel = SequenceParallel(self._model)
        self._swaps = Swaps()
        self._step: _Step | None = None
        self._is_idle_step = False
        """A step of other ranks' tokens runs, and `_step` is None."""

    def bind(
        self, attention: Attention, caches: Sequence[LayerCache], ops: LayerOps, *, max_positions: int
    ) -> None:
        """Puts `attention` on the model, one cache per attention layer; undone if anything fails.

        Dense layers run as one function each, on `ops`.
        """
        assert not any(module.training for module in self._model.modules()), "the model is in training mode"
        if "megallm_is_bound" in vars(self._model):
            raise LifecycleError("another engine runs on this model; shut that one down first")
        try:
            self._swaps.set(self._model, "megallm_is_bound", True)
            self._bind_rotary(max_positions)
            self._bind_detours(ops)
            for dispatcher, name, exchange in self.experts.exchanges(self.shape.device):
                self._swap(dispatcher, name, exchange)
            next_norm = NextNorm()
            for site, cache in zip(self._sites, caches, strict=True):
                self._bind_attention(attention, site, cache, ops, next_norm)
            self._bind_last_norm(ops, next_norm)
            if self._output_layer is not None:
                handle = self._output_layer.register_forward_pre_hook(
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

    def forward(
        self, inputs: StepInputs, score: Callable[[Tensor, int], None], states: Tensor | None = None
    ) -> Tensor:
        """Runs the model over one step's packed tokens; gives the sampled tokens' logits, `[samples, vocab]`.

        The scored tokens' logits go to `score` in parts, with the number of those before: all of a long
        prompt's at once would take gigabytes. `states`: the hidden states of the stage before, where this is
        a stage of a pipeline; any but the last gives its own, `[tokens, 1, hidden]`.
        """
        step = self._step = _Step(inputs=inputs, angles={})
        users_states = self._model.decoder.input_tensor
        try:
            with self._sequence_parallel.off():
                if states is not None:
                    self._model.set_input_tensor(states)
                output = self._model(
                    inputs.token_ids[None],
                    inputs.batch.positions[None],
                    None,
                    runtime_gather_output=self._vocab_group is None,
                )
                self._score(step, score)
        finally:
            self._step = None
            self._model.decoder.input_tensor = users_states
        return output if self._output_layer is None else self._of_all_ranks(output[0])

    def take_part(self) -> None:
        """Does in a step without tokens what the other ranks that hold the experts wait for."""
        if not self.experts.is_spread:
            return
        self._is_idle_step = True
        try:
            with self._sequence_parallel.off():
                self.experts.run_without_tokens(self.shape.dtype, self.shape.device)
        finally:
            self._is_idle_step = False

    def _of_all_ranks(self, logits: Tensor) -> Tensor:
        return logits if self._vocab_group is None else gathered_logits(logits, self._vocab_group)

    def _score(self, step: _Step, score: Callable[[Tensor, int], None]) -> None:
        if step.scored_states is None:
            return
        step.is_scoring = True
        first = 0
        for states in step.scored_states.split(SCORED_AT_ONCE):
            logits, _ = self._output_layer(states, **step.output_options)
            scaled = self._model._scale_logits(logits)[:, 0]  # noqa: SLF001 - the model's own last step
            score(self._of_all_ranks(scaled), first)
            first += len(states)

    def _swap(self, module: MegatronModule, name: str, while_stepping: Callable[..., object]) -> None:
        """Makes `module.name` do something else during a step."""
        original = getattr(module, name)

        def swapped(*args: object, **kwargs: object) -> object:
            is_stepping = self._step is not None or self._is_idle_step
            return (while_stepping if is_stepping else original)(*args, **kwargs)

        self._swaps.set(module, name, swapped)

    def _bind_attention(
        self,
        attention: Attention,
        site: AttentionSite,
        cache: LayerCache,
        ops: LayerOps,
        next_norm: NextNorm,
    ) -> None:
        sinks = sinks_of(site.attention, site.shape)
        paged = PagedLayer(shape=site.shape, cache=cache, sinks=sinks)

        def forward(
            query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_ignored: object
        ) -> Tensor:
            # megatron has normed queries and keys: this layer has no norms
            return attention.attend(paged, query[:, 0], key[:, 0], value[:, 0])[:, None]

        self._swap(site.attention.core_attention, "forward", forward)
        if is_dense_layer(site.layer):
            norms = head_norms_of(site.attention) if attention.norms_heads else None
            of_layer = dense_layer(
                site.layer,
                partial(attention.attend, structs.replace(paged, norms=norms)),
                ops,
                site.layer.forward,
                following=self._following(site.layer),
                next_norm=next_norm,
                wanted=self._take_wanted if site.layer is self._model.decoder.layers[-1] else None,
                attend_norms_heads=norms is not None,
            )
            self._swap(site.layer, "forward", of_layer)

    def _take_wanted(self) -> Tensor | None:
        """Gives the tokens whose states go on from the last layer; None is all of them."""
        step = self._step
        assert step is not None, "a layer runs outside a step"
        if self._output_layer is None or not self.is_whole:
            return None  # ranks that share the layer must agree, and each knows its own hooks alone
        wanted = self._wanted_rows.of(step.inputs)
        step.has_only_wanted = wanted is not None
        return wanted

    def _bind_last_norm(self, ops: LayerOps, next_norm: NextNorm) -> None:
        """Takes the last layer's output normed where that has been done, else norms it as the layers do."""
        last = self._last_norm()
        if last is None:
            return

        def forward(rows: Tensor) -> Tensor:
            normed = next_norm.take(rows)
            return ops.rms_norm(rows, last.weight, last.eps) if normed is None else normed[:, None]

        self._swap(last, "forward", forward)

    def _last_norm(self) -> MegatronModule | None:
        """Gives the norm after the last layer, where it is one of the layers' kind."""
        last: MegatronModule = getattr(self._model.decoder, "final_layernorm", None)
        return last if self.is_dense and type(last) is nn.RMSNorm and last.eps is not None else None

    def _following(self, layer: MegatronModule) -> MegatronModule | None:
        """Gives what comes after a layer, where that is a dense layer or the known last norm."""
        layers = list(self._model.decoder.layers)
        following = layers[layers.index(layer) + 1 :][:1]
        if not following:
            return self._last_norm()
        return following[0] if is_dense_layer(following[0]) else None

    def _bind_rotary(self, max_positions: int) -> None:
        """Gives every rotary module one row per token; or None, where the backend turns instead."""
        rotary = getattr(self._model, "rotary_pos_emb", None)
        if rotary is not None:
            angles, mscale = angles_of(rotary, max_positions, self.shape.device)
            if has_rope_to_turn(self._model):
                turned = [site.attention for site in self._sites if site.shape.uses_rope]
                self.rope = table_of(
                    angles[:, 0, 0],
                    factor=turned[0]._yarn_concentration_factor if turned else 1.0,  # noqa: SLF001 - megatron keeps it nowhere else
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
            if is_sliced_linear(module):
                if is_plain_linear(module):
                    self._swap(module, "forward", plain_linear(module, ops.linear))
                self._prepare(module, ops)
            elif isinstance(module, Router) and (self.experts.is_spread or self.shape.device.type == "cpu"):
                self._swap(module, "gating", router_gate(module))

    def _prepare(self, linear: MegatronModule, ops: LayerOps) -> None:
        """Lays a layer's own weight out for `ops`; never an embedding's, whose rows are looked up."""
        looked_up = None if self._embedding is None else self._embedding.word_embeddings.weight
        if linear.weight is not None and linear.weight is not looked_up:
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
        if inputs.logit_tokens is not None and not step.has_only_wanted:
            states = states.index_select(0, inputs.logit_tokens)
        return (states, *args[1:]), options
