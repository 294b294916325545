"""The megatron-core model, against transformers' greedy reference in float32."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megallm.models.checkpoint import Hyperparameters, tensor_specs
from megallm.models.load import load_model
from tests.models import tiny_hf
from tests.models.plain_forward import plain_logits
from tests.models.tiny_gguf import TINY, write_tiny

# megatron's own modules say so to each other, at every step
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "reference" / "smollm2_greedy.json").read_text()
)
CASES: list[dict[str, Any]] = REFERENCE["cases"]


def test_the_reference_covers_what_it_says() -> None:
    """Other tests take exact equality from it, so near-ties must not be in it."""
    assert [len(case["prompt"]) for case in CASES] == sorted(len(case["prompt"]) for case in CASES)
    assert len(CASES) == 24
    assert {1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700} <= {len(case["prompt"]) for case in CASES}
    for case in CASES:
        assert (
            len(case["generated"])
            == len(case["leads"])
            == len(case["log_probs"])
            == REFERENCE["num_new_tokens"]
        )
        assert min(case["leads"]) >= REFERENCE["min_lead"] >= 1e-3


@pytest.mark.parametrize(
    "case", CASES[:12:3] + CASES[-4:-3], ids=lambda case: f"{len(case['prompt'])} tokens"
)
def test_every_greedy_token_and_its_log_probability_equal_transformers(
    demo_model: Any, case: dict[str, Any]
) -> None:
    """One wrongly placed row anywhere in 135 million weights shows here."""
    model, _ = demo_model
    prompt, generated = case["prompt"], case["generated"]
    logits = plain_logits(model, prompt + generated[:-1])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == generated
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0]
    torch.testing.assert_close(log_probs, torch.tensor(case["log_probs"]), atol=2e-4, rtol=0)


def naive_logits(weights: dict[str, np.ndarray], size: Hyperparameters, ids: list[int]) -> np.ndarray:
    """Gives a Llama's logits in plain numpy and double precision, `[tokens, vocab]`."""

    def normed(hidden: np.ndarray, name: str) -> np.ndarray:
        return (
            hidden
            / np.sqrt((hidden**2).mean(-1, keepdims=True) + size.norm_epsilon)
            * weights[name + ".weight"]
        )

    def heads(hidden: np.ndarray, name: str, num_heads: int) -> np.ndarray:
        projected = hidden @ weights[name + ".weight"].T.astype(np.float64)
        return projected.reshape(len(ids), num_heads, size.head_dim).swapaxes(0, 1)

    def rotated(states: np.ndarray) -> np.ndarray:
        angles = np.outer(
            np.arange(len(ids)), size.rotary_base ** (-np.arange(0, size.head_dim, 2) / size.head_dim)
        )
        first, second = np.split(states, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    hidden = weights["model.embed_tokens.weight"][ids].astype(np.float64)
    group = size.num_heads // size.num_kv_heads
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}."
        inputs = normed(hidden, prefix + "input_layernorm")
        query = rotated(heads(inputs, prefix + "self_attn.q_proj", size.num_heads))
        key = rotated(heads(inputs, prefix + "self_attn.k_proj", size.num_kv_heads)).repeat(group, 0)
        value = heads(inputs, prefix + "self_attn.v_proj", size.num_kv_heads).repeat(group, 0)
        scores = query @ key.swapaxes(1, 2) / np.sqrt(size.head_dim) + np.triu(
            np.full((len(ids), len(ids)), -1e9), 1
        )
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ value
        hidden += mixed.swapaxes(0, 1).reshape(len(ids), -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        inputs = normed(hidden, prefix + "post_attention_layernorm")
        gate = inputs @ weights[prefix + "mlp.gate_proj.weight"].T
        up = inputs @ weights[prefix + "mlp.up_proj.weight"].T
        hidden += (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
    output = "model.embed_tokens.weight" if size.is_tied else "lm_head.weight"
    return normed(hidden, "model.norm") @ weights[output].T


@pytest.mark.parametrize(
    "size",
    [
        TINY,
        msgspec.structs.replace(TINY, is_tied=False),
        msgspec.structs.replace(TINY, num_kv_heads=4, head_dim=32),
    ],
    ids=["tied", "untied", "as many KV heads as heads, wider than the hidden size"],
)
def test_a_model_of_any_shape_equals_the_formula(tmp_path: Path, size: Hyperparameters) -> None:
    """The demo model is one shape; the layout must be right for the others too."""
    weights = write_tiny(tmp_path / "tiny.gguf", size=size)
    model, _ = load_model(tmp_path / "tiny.gguf", dtype=torch.float32, device="cpu")
    ids = [5, 0, 271, 17, 17, 99]
    found = plain_logits(model, ids).numpy()
    np.testing.assert_allclose(found, naive_logits(weights, size, ids), atol=2e-5)


def test_parameters_are_frozen_in_the_asked_dtype_and_hold_every_weight(tmp_path: Path) -> None:
    """A stray float32 parameter fails in the first matrix product, a trainable one keeps every activation."""
    write_tiny(tmp_path / "tiny.gguf")
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load_model(tmp_path / "tiny.gguf", dtype=dtype, device="cpu")
        parameters = list(model.parameters())
        assert {parameter.dtype for parameter in parameters} == {dtype}
        assert not any(parameter.requires_grad for parameter in parameters)
        assert not model.training
        assert sum(map(torch.Tensor.numel, parameters)) == sum(
            np.prod(spec.shape) for spec in tensor_specs(TINY)
        )
        assert model.config.params_dtype is dtype
        assert model.max_sequence_length == TINY.max_positions


def test_routers_biases_are_in_float32_whatever_the_model_is_in(tmp_path: Path) -> None:
    """They decide between experts whose scores are close."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    theirs = tiny_hf.hf_model("glm4_moe", **sizes)
    model, _ = load_model(tiny_hf.save(theirs, tmp_path), dtype=torch.bfloat16, device="cpu")
    bias = model.decoder.layers[2].mlp.router.expert_bias
    assert bias.dtype is torch.float32
    assert bias.equal(theirs.model.layers[2].mlp.gate.e_score_correction_bias)
