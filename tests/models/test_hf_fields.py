"""What configs say of windows, biases and factors; that models come out right is in test_hf_families.py."""

from pathlib import Path
from typing import Any

import pytest

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.hf_families import FAMILIES
from megallm.models.hf_windows import Fields
from megallm.models.settings_file import Settings


def fields(name: str, **config: Any) -> Fields:  # Any: JSON
    """Gives what a family reads out of a config of six layers."""
    family = FAMILIES[f"{name}ForCausalLM"]
    values = {"num_hidden_layers": 6, "hidden_size": 64} | config
    return family.fields(family.settings(Settings(Path("config.json"), values)))


@pytest.mark.parametrize(
    ("name", "windowed"),
    [
        ("Gemma2", (0, 2, 4)),
        ("Gemma3", (0, 1, 2, 3, 4)),
        ("Olmo3", (0, 1, 2, 4, 5)),
        ("Exaone4", (0, 1, 2, 4, 5)),
    ],
)
def test_windows_are_where_the_family_has_them_unless_the_config_says_where(
    name: str, windowed: tuple[int, ...]
) -> None:
    """Configs were written with a pattern, with kinds of layers, or with neither."""
    assert fields(name)["windowed_layers"] == windowed
    assert fields(name)["window"] == 4095
    assert fields(name, sliding_window_pattern=3)["windowed_layers"] == (0, 1, 3, 4)
    kinds = ["sliding_attention"] + ["full_attention"] * 5
    said = fields(name, layer_types=kinds, sliding_window=8, sliding_window_pattern="LLLG")
    assert (said["windowed_layers"], said["window"]) == ((0,), 7)
    assert "windowed_layers" not in fields(name, sliding_window=None)
    assert "windowed_layers" not in fields(name, layer_types=["full_attention"] * 6)
    with pytest.raises(ModelFileError, match="sliding_window_pattern is str"):
        fields(name, sliding_window_pattern="LLLG")


def test_exaone_s_layers_without_a_window_do_not_turn_unless_none_has_one() -> None:
    """Its small models have no windows, and turn throughout."""
    assert fields("Exaone4")["unturned_layers"] == (3,)
    assert fields("Exaone4", sliding_window=None)["unturned_layers"] == ()


def test_olmo_s_windowed_layers_turn_by_the_same_base_unscaled() -> None:
    """Its config has one base, old or new, and scaling for the others alone."""
    assert fields("Olmo3")["windowed_rotary_base"] == 500_000.0
    assert fields("Olmo3", rope_theta=7000)["windowed_rotary_base"] == 7000.0
    assert "windowed_rotary_base" not in fields("Olmo3", sliding_window=None)


def test_biases_are_where_each_family_has_them() -> None:
    """A bias that is not looked for is a tensor of no use, and one that is not there a folder incomplete."""

    def biased(name: str, **config: Any) -> tuple[bool, ...]:  # Any: JSON
        kinds = ("has_qkv_bias", "has_output_bias", "has_mlp_bias")
        return tuple(fields(name, **config).get(kind, False) for kind in kinds)

    assert biased("Glm") == biased("Glm4") == biased("SeedOss") == (True, False, False)
    assert biased("Glm4", attention_bias=False) == (False, False, False)
    assert biased("SeedOss", attention_out_bias=True, mlp_bias=True) == (True, True, True)
    assert biased("Ernie4_5") == biased("Olmo2") == biased("Exaone4") == (False, False, False)
    assert biased("Ernie4_5", use_bias=True) == (True, True, True)


MIXED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 3,
    "norm_topk_prob": True,
}


def test_experts_scored_by_sigmoid_share_one_as_large_as_several() -> None:
    """The first layers have none."""
    experts = fields("Glm4Moe", **MIXED, first_k_dense_replace=2, routed_scaling_factor=1.5)["experts"]
    assert (experts.shared_ffn_size, experts.dense_layers, experts.share_factor) == (72, (0, 1), 1.5)
    assert fields("Dots1", **MIXED)["experts"].dense_layers == ()


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Glm4Moe", {"norm_topk_prob": False}, "supported are norm_topk_prob true, n_group 1"),
        ("Glm4Moe", {"n_group": 4}, "supported are norm_topk_prob true, n_group 1"),
        ("Dots1", {"num_experts_per_tok": 1}, "num_experts_per_tok of 2 or more"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported is null"),
        ("GptOss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; supported is 1.702"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    """The text would be fluent, and worse."""
    with pytest.raises(UnsupportedModelError, match=said):
        fields(name, **MIXED | changes)


def test_granite_s_factors_are_one_where_the_config_has_none() -> None:
    """And the one on scores is one, too: not the root of the head's size."""
    names = ("embedding_factor", "residual_factor", "score_scale", "logit_factor")
    assert [fields("Granite")[name] for name in names] == [1.0] * 4
    factors = {
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16,
    }
    assert [fields("Granite", **factors)[name] for name in names] == [12.0, 0.22, 0.0078125, 1 / 16]
