"""The hook gives the user's model back, leaves it usable meanwhile, and refuses what it does not know."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import CrossAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megallm.core_async.device.attention import Attention, LayerShape
from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.attention_triton import TritonAttention
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.kv_cache import CacheShape, LayerCache, PagedCache
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.rows import Rows
from megallm.core_async.device.step_inputs import inputs_of
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.messages import Ints, StepPlan, pack_ints
from tests.device.conftest import StartRunner, built
from tests.device.models import Megatron, cpu_is_current, plain_continuation, plain_logits


def snapshot(model: Megatron) -> dict[str, Any]:  # Any: whatever a module holds
    """Gives everything of a model that binding might leave changed, identities included."""
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "parameters": [
            (name, id(parameter), parameter.data_ptr(), parameter.stride())
            for name, parameter in model.named_parameters()
        ],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "keys": list(model.state_dict()),
        "attributes": {
            name: {key: id(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()
        },
        "hooks": {
            name: (list(module._forward_pre_hooks), list(module._forward_hooks))  # noqa: SLF001
            for name, module in model.named_modules()
        },
    }


def test_unbind_leaves_every_module_as_it_was(any_model: Megatron, start: StartRunner) -> None:
    """The model is the user's; a trainer goes on with it."""
    before, values = (
        snapshot(any_model),
        {name: value.clone() for name, value in any_model.named_parameters()},
    )
    planner = start(any_model)
    planner.decode(planner.add([1, 2, 3]), num_steps=3)
    planner.runner.close()
    assert snapshot(any_model) == before
    assert all(value.equal(values[name]) for name, value in any_model.named_parameters())


def test_names_and_state_dict_stay_while_bound(any_model: Megatron, start: StartRunner) -> None:
    """A trainer walks the parameters and saves checkpoints while the engine is paused."""
    before = snapshot(any_model)
    start(any_model)
    bound = snapshot(any_model)
    assert [bound[kept] for kept in ("modules", "buffers", "keys")] == [
        before[kept] for kept in ("modules", "buffers", "keys")
    ]
    assert [(name, identity) for name, identity, *_ in bound["parameters"]] == [
        (name, identity) for name, identity, *_ in before["parameters"]
    ]


def test_bound_model_outside_a_step_is_megatrons_own(any_model: Megatron, start: StartRunner) -> None:
    """An RL loop computes log-probs and gradients with the model whose engine is paused."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    before = plain_logits(any_model, tokens)
    planner = start(any_model)
    planner.decode(planner.add(tokens), num_steps=2)
    assert plain_logits(any_model, tokens).equal(before)


def test_linear_layers_of_the_bound_model_still_have_gradients(model: Megatron, start: StartRunner) -> None:
    """Megatron's own autograd function accumulates into main_grad, and must be the one that runs."""
    start(model)
    linear = model.decoder.layers[0].mlp.linear_fc1
    hidden = torch.randn(2, 1, 64, requires_grad=True)
    with cpu_is_current():
        linear(hidden)[0].sum().backward()
    assert hidden.grad is not None


def test_failure_half_way_through_binding_undoes_the_first_half(model: Megatron) -> None:
    """Construction failed, so nobody would ever call unbind."""
    before = snapshot(model)
    hook = ModelHook(model)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        hook.bind(SdpaAttention(4), [LayerCache()], TorchOps(), max_positions=32)
    assert snapshot(model) == before
    assert hook.rope is None


def test_hooks_of_the_user_still_run(model: Megatron, start: StartRunner) -> None:
    """Activation capture is common in research; swaps must not go round it."""
    seen: list[tuple[int, ...]] = []

    def see(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(tuple((out[0] if isinstance(out, tuple) else out).shape))

    attention = model.decoder.layers[1].self_attention
    watched = (attention.core_attention, attention.linear_proj, model.decoder.layers[1])
    handles = [module.register_forward_hook(see) for module in watched]
    planner = start(model)
    planner.decode(planner.add([1, 2, 3]), num_steps=1)
    for handle in handles:
        handle.remove()
    assert seen == [(3, 1, 64)] * 3


def test_training_mode_is_a_broken_invariant(model: Megatron) -> None:
    """Dropout would sample noise; the facade refuses such a model before."""
    hook = ModelHook(model)
    model.train()
    try:
        with pytest.raises(AssertionError, match="training mode"):
            hook.bind(SdpaAttention(4), [LayerCache()] * 3, TorchOps(), max_positions=32)
    finally:
        model.eval()


def test_shape_tells_layers_apart() -> None:
    """Backends choose by it; a window on every other layer is two kinds."""
    shape = ModelHook(built("window on some layers")).shape
    assert [layer.window for layer in shape.attention_layers] == [5, None, 5]
    assert shape.attention_layers[0] == LayerShape(4, 2, 16, 16, 0.25, window=5, uses_rope=True)
    assert (shape.num_layers, shape.vocab_size, shape.max_positions) == (3, 96, None)
    assert shape.layer_weights == 36_864
    assert [
        layer.uses_rope for layer in ModelHook(built("some layers do not turn")).shape.attention_layers
    ] == [
        True,
        True,
        False,
    ]
    assert ModelHook(built("learned positions")).shape.max_positions == 256
    assert len(ModelHook(built("hybrid")).shape.attention_layers) == 2
    latent = ModelHook(built("latent attention")).shape.attention_layers[0]
    assert (latent.num_kv_heads, latent.head_dim, latent.value_head_dim) == (4, 24, 12)


class MambaLayer(nn.Module):
    """Has the name of what is not run."""


def test_unknown_layer_is_refused_by_name(model: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user reads which layer it is and what would work, before anything runs."""
    monkeypatch.setitem(model.decoder.layers._modules, "1", MambaLayer())  # noqa: SLF001
    with pytest.raises(
        UnsupportedModelError, match=r"decoder\.layers\.1 is a MambaLayer; supported are GPTModel"
    ):
        ModelHook(model)


def test_cross_attention_is_refused_by_name(model: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys come from an encoder that no request brings."""
    cross = CrossAttention.__new__(CrossAttention)
    nn.Module.__init__(cross)
    monkeypatch.setitem(model.decoder.layers[2]._modules, "cross_attention", cross)  # noqa: SLF001
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.2 has a CrossAttention"):
        ModelHook(model)


def test_unknown_attention_and_core_are_refused_by_name(
    model: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing an unknown core by softmax attention would give wrong text without a word."""
    attention = model.decoder.layers[0].self_attention
    with monkeypatch.context() as patched:
        patched.setitem(attention._modules, "core_attention", MambaLayer())  # noqa: SLF001
        with pytest.raises(
            UnsupportedModelError, match=r"core_attention is a MambaLayer.*DotProductAttention"
        ):
            ModelHook(model)
    monkeypatch.setitem(model.decoder.layers[0]._modules, "self_attention", MambaLayer())  # noqa: SLF001
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.0 has a MambaLayer"):
        ModelHook(model)


def test_mask_that_looks_ahead_is_refused(model: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's layers look the same but for the mask."""
    monkeypatch.setattr(model.decoder.layers[1].self_attention, "attn_mask_type", AttnMaskType.no_mask)
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.1 attends with mask no_mask"):
        ModelHook(model)


def test_core_attention_of_a_subclass_is_known() -> None:
    """Models for MLA without Transformer Engine need one."""
    assert issubclass(
        type(built("latent attention").decoder.layers[0].self_attention.core_attention), DotProductAttention
    )
    ModelHook(built("latent attention"))


class RecordingOps(TorchOps):
    """torch's arithmetic, which keeps how wide the rows of each norm were."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Gives each row over its root mean square, times `weight`."""
        self.widths.append(rows.shape[-1])
        return super().rms_norm(rows, weight, epsilon)


def refuse_scores(logits: Tensor, first: int) -> None:
    """Stands for what takes a prompt's logits, which nobody asks for."""
    raise AssertionError(f"{len(logits)} tokens after {first} were scored")


def allocated_caches(hook: ModelHook) -> PagedCache:
    """Gives caches for a hook's layers, of a few small blocks on the CPU."""
    shapes = [
        CacheShape(layer.num_kv_heads, layer.head_dim, layer.value_head_dim)
        for layer in hook.shape.attention_layers
    ]
    caches = PagedCache(shapes, num_blocks=8, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    caches.allocate()
    for layer in caches.layers:  # fresh memory may overflow in the interpreter, which warns of it
        layer.keys.zero_()
        layer.values.zero_()
    return caches


def continuation(hook: ModelHook, attention: Attention, prompt: list[int], *, num_steps: int = 6) -> Tensor:
    """Gives the logits, `[num_steps, vocab]`, of greedy steps: a prompt's chunk, and decode rows after it."""
    rows = Rows(max_requests=1, max_sequence_length=32, block_size=4, device=torch.device("cpu"))
    rows.block_tables[0] = range(rows.block_tables.shape[1])
    nothing, tokens, logits = Ints(b""), list(prompt), list[Tensor]()
    for step in range(num_steps):
        start = len(tokens) - 1 if step else 0
        plan = StepPlan(
            step=step,
            num_decode=int(step > 0),
            rows=pack_ints([0]),
            starts=pack_ints([start]),
            lengths=pack_ints([len(tokens) - start]),
            samples=bytes([1]),
            tokens=nothing if step else pack_ints(tokens),
            new_rows=[],
            changed_rows=nothing,
            changed_starts=nothing,
            changed_counts=nothing,
            blocks=nothing,
        )
        inputs = inputs_of(plan, rows, block_size=4, device=torch.device("cpu"), rope=hook.rope)
        with torch.inference_mode():
            attention.begin_step(inputs.batch)
            logits.append(hook.forward(inputs, refuse_scores)[0])
            rows.last_tokens[0] = logits[-1].argmax()
        tokens.append(int(rows.last_tokens[0]))
    return torch.stack(logits)


@pytest.mark.parametrize("watched", [None, "mlp.linear_fc2", "self_attention.q_layernorm"])
@pytest.mark.parametrize("backend", [TritonAttention(), SdpaAttention(4)], ids=["triton", "sdpa"])
@pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)
def test_queries_and_keys_are_normed_once_whoever_norms_them(backend: Attention, watched: str | None) -> None:
    """A backend that norms heads does in the layers that run as one function; megatron in a watched one."""
    model, prompt = built("query and key norms, biases"), [3, 1, 4, 1, 5]
    hook, ops = ModelHook(model), RecordingOps()
    caches, num_steps = allocated_caches(hook), 3  # each takes seconds in the interpreter
    ran: list[int] = []

    def see(module: nn.Module, args: object, out: object) -> None:
        ran.append(1)

    handles: list[RemovableHandle] = []
    if watched is not None:
        handles.append(model.decoder.layers[1].get_submodule(watched).register_forward_hook(see))
    hook.bind(backend, caches.layers, ops, max_positions=32)
    try:
        logits = continuation(hook, backend, prompt, num_steps=num_steps)
    finally:
        hook.unbind()
        for handle in handles:
            handle.remove()
    greedy = plain_continuation(model, prompt, num_steps)
    assert logits.argmax(-1).tolist() == greedy
    expected = plain_logits(model, prompt + greedy[:-1])[len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert len(ran) == (0 if watched is None else num_steps)
    num_own = 0 if backend.norms_heads else 2 if watched else 3
    assert ops.widths.count(16) == num_steps * 2 * num_own
