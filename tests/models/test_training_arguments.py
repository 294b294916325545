"""Training arguments as hyperparameters."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Experts, Hyperparameters, RopeScaling, tensor_specs
from megallm.models.settings_file import Settings
from megallm.models.training_arguments import hyperparameters_of
from tests.models.tiny_torch_dist import ARGUMENTS, SIZE


def read(**changes: Any) -> Hyperparameters:  # Any: as ARGUMENTS
    """Gives the hyperparameters of changed arguments."""
    return hyperparameters_of(Settings(Path("run"), ARGUMENTS | changes, "args."))


def test_arguments_of_every_kind_are_taken() -> None:
    """Each of them changes the output and none the shape of a tensor, or only some."""
    assert read(group_query_attention=False).num_kv_heads == SIZE.num_heads
    assert read(untie_embeddings_and_output_weights=False).is_tied
    assert read(rotary_percent=0.5).rotary_dim == SIZE.head_dim // 2
    assert read(use_rope_scaling=True, rope_scaling_factor=32).rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, original_positions=8192
    )
    assert read(no_rope_freq=2).unturned_layers == (1,)
    assert read(no_rope_freq=[1, 0]).unturned_layers == (0,)
    assert read(position_embedding_type="none").unturned_layers == (0, 1)
    assert read(window_size=(7, 0)).windowed_layers == (0, 1)
    assert read(window_size=(7, 0), window_attn_skip_freq=2).windowed_layers == (0,)
    assert read(window_size=(7, 0), window_attn_skip_freq=[0, 1]).windowed_layers == (1,)
    assert read(add_bias_linear=True).has_mlp_bias
    assert read(add_qkv_bias=True).has_qkv_bias
    experts = Experts(num_experts=4, num_chosen=2, ffn_size=24, is_renormalised=False, dense_layers=(0,))
    moe = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": True}
    assert read(**moe, moe_layer_freq=[0, 1]).experts == experts
    scored = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    shared = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
    assert read(
        **moe, **scored, **shared, moe_layer_freq=[0, 1], moe_router_topk_scaling_factor=2.5
    ).experts == msgspec.structs.replace(
        experts, shared_ffn_size=48, has_shared_gate=True, scoring="sigmoid", share_factor=2.5
    )


@pytest.mark.parametrize(("scoring", "has_bias"), [("softmax", True), ("sigmoid", False), ("tanh", False)])
def test_a_router_that_is_not_built_is_refused(scoring: str, has_bias: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Other experts would run."""
    with pytest.raises(UnsupportedModelError, match=r"moe_router_score_function is .*; supported is softmax"):
        read(num_experts=4, moe_router_score_function=scoring, moe_router_enable_expert_bias=has_bias)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("position_embedding_type", "learned_absolute"),
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
        ("window_size", (4, 4)),
    ],
)
def test_a_model_of_other_parts_is_refused_by_its_argument(name: str, value: object) -> None:
    """Half of them would load and answer nonsense."""
    with pytest.raises(UnsupportedModelError, match=rf"run: args\.{name} is .*supported is"):
        read(**{name: value})


def test_a_hybrid_pattern_says_what_each_layer_is() -> None:
    """A layer's kind shows in no other argument, and lists of layers go by its count."""
    moe = {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": 5, "num_layers": None}
    size = read(**moe, hybrid_layer_pattern="**-|E*", window_size=(7, 0), window_attn_skip_freq=2)
    assert (size.num_layers, size.layer_kinds, size.num_attention_layers) == (5, "**-E*", 3)
    assert [size.has_experts(layer) for layer in range(5)] == [False, False, False, True, False]
    assert size.windowed_layers == (0, 4)
    assert read(num_layers=None, hybrid_override_pattern="*-").layer_kinds == "*-"
    assert read(**moe, hybrid_layer_pattern="*-").experts is None
    shapes = {spec.name: spec.shape for spec in tensor_specs(size)}
    assert {name.partition(".layers.")[2][:1] for name in shapes if ".self_attn.q_proj" in name} == set("014")
    assert "model.layers.3.mlp.experts.3.up_proj.weight" in shapes
    assert "model.layers.0.mlp.up_proj.weight" not in shapes


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("M-*-", r"is 'M-\*-': layer 0 is a Mamba layer; supported are attention"),
        ("*-G", "layer 2 is a Gated DeltaNet layer"),
        ("+-", "layer 0 is multi-latent attention"),
        ("*-/*", "layer 2 is multi-token prediction"),
        ("*x", "layer 1 is 'x', which is unknown here"),
        ("--", r"is '--', supported is one with attention \(\*\) in it"),
    ],
)
def test_a_layer_that_is_not_run_is_refused_by_name(pattern: str, said: str) -> None:
    """Most hybrid models have Mamba layers, and the letter says little."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        with pytest.raises(UnsupportedModelError, match=rf"run: args\.{name}.*{said}"):
            read(**{name: pattern})
