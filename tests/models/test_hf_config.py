"""The keys of a config.json, old spellings and new, and what is refused among them."""

from pathlib import Path
from typing import Any

import pytest

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import Hyperparameters, RopeScaling
from megallm.models.hf_config import hyperparameters
from megallm.models.hf_families import family_of
from megallm.models.settings_file import Settings

LLAMA: dict[str, Any] = {  # Any: JSON
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def read(**changes: Any) -> Hyperparameters:  # Any: JSON
    """Gives the hyperparameters of a changed config."""
    settings = Settings(Path("config.json"), LLAMA | changes)
    return hyperparameters(settings, family_of(settings))


def test_what_a_config_leaves_out_is_the_family_s_default() -> None:
    """Configs are written without what equals the default of the library that wrote them."""
    size = read()
    assert (size.num_kv_heads, size.head_dim, size.rotary_base, size.norm_epsilon) == (4, 8, 10_000.0, 1e-6)
    assert not size.is_tied
    mixtral = read(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
    assert (mixtral.rotary_base, mixtral.norm_epsilon) == (1_000_000.0, 1e-5)
    smollm = read(architectures=["SmolLM3ForCausalLM"])
    assert (smollm.is_tied, smollm.unturned_layers) == (True, (3,))
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_rotary_settings_are_found_in_their_old_place_and_in_their_new_one() -> None:
    """Transformers 5 moved them; most folders are older."""
    linear = RopeScaling(kind="linear", factor=2.0)
    for settings in (
        {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500, "factor": 2.0}},
    ):
        size = read(**settings)
        assert (size.rotary_base, size.rope_scaling) == (500.0, linear)
    assert read(partial_rotary_factor=0.5).rotary_dim == 4


def test_yarn_s_factor_is_the_paper_s_unless_the_config_says_otherwise() -> None:
    """It multiplies every score; wrong by a tenth it shows only in long texts."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

    def factor(**changes: float) -> float:
        scaling = read(rope_scaling=yarn | changes).rope_scaling
        assert scaling is not None
        return scaling.attention_factor

    assert factor() == pytest.approx(1.1386, abs=1e-4)
    assert factor(attention_factor=1.0) == 1.0
    assert factor(mscale=0.707, mscale_all_dim=0.707) == 1.0
    assert factor(factor=1.0) == 1.0


def test_longrope_s_factor_comes_of_both_lengths_unless_the_config_says_otherwise() -> None:
    """Phi-3's configs have the original length outside of the rotary settings, and their first ones "su"."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2, 3, 4, 5]}

    def scaling(**changes: Any) -> RopeScaling:  # Any: JSON
        rope = {"rope_type": "longrope"} | factors | changes
        found = read(rope_scaling=rope, original_max_position_embeddings=32).rope_scaling
        assert found is not None
        return found

    phi = scaling()
    assert (phi.divisors, phi.long_divisors, phi.original_positions) == ((1.0,) * 4, (2.0, 3.0, 4.0, 5.0), 32)
    assert phi.attention_factor == pytest.approx(1.4**0.5)
    assert scaling(rope_type="su") == phi
    assert scaling(factor=1.0).attention_factor == 1.0
    assert scaling(attention_factor=1.5).attention_factor == 1.5


def test_a_dynamic_kind_goes_by_the_config_s_whole_length() -> None:
    """As transformers reads it."""
    wanted = RopeScaling(kind="dynamic", factor=4.0, original_positions=128)
    assert read(rope_scaling={"type": "dynamic", "factor": 4}).rope_scaling == wanted


def test_rotary_kinds_that_are_not_run_are_refused_by_name() -> None:
    """They work for short texts, so nobody would notice."""
    with pytest.raises(
        UnsupportedModelError, match=r"rope_scaling\.rope_type is 'unheard of'; supported are"
    ):
        read(rope_scaling={"rope_type": "unheard of", "factor": 2.0})


GEMMA3: dict[str, Any] = {  # Any: JSON
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_gemma_3_is_read_from_as_little_as_its_makers_wrote() -> None:
    """Their configs leave out whatever equals a default, heads and vocabulary among it."""
    size = read(architectures=["Gemma3ForConditionalGeneration"], text_config=GEMMA3)
    assert (size.num_heads, size.num_kv_heads, size.head_dim, size.vocab_size) == (8, 4, 256, 262_208)
    assert (size.rotary_base, size.windowed_rotary_base) == (1_000_000.0, 10_000.0)
    assert size.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (size.window, size.windowed_layers) == (1023, (0, 1, 2, 3, 4, 6, 7))
    assert (size.is_tied, size.score_scale, size.logit_softcap) == (True, 1 / 16, None)


def test_gemma_3_s_windowed_layers_turn_as_the_config_says_in_either_spelling() -> None:
    """One object for each kind of layer since transformers 5."""
    kinds = {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 50.0}}
    for changes, bases in (
        ({"rope_parameters": kinds}, (5000.0, 50.0)),
        ({"rope_theta": 7000, "rope_local_base_freq": 70}, (7000.0, 70.0)),
    ):
        size = read(
            **LLAMA | GEMMA3 | {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": None} | changes
        )
        assert (size.rotary_base, size.windowed_rotary_base, size.rope_scaling) == (*bases, None)
    whole = read(**LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 1})
    assert whole.windowed_rotary_base is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is silu"),
        ({"architectures": ["MambaForCausalLM"]}, "supported are LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "supported are LlamaForCausalLM, Mistral"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is true",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            r"rope_parameters\.sliding_attention\.rope_type is 'linear'; supported",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"],
            },
            r"layer_types has \['chunked_attention'\]",
        ),
    ],
)
def test_parts_that_are_not_run_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    """The name is what a user can look up."""
    with pytest.raises(UnsupportedModelError, match=said):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "32"}, "config.json: hidden_size is str 32, int is needed"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_heads is 3, no multiple"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"partial_rotary_factor": 2.0}, "rotary_dim is 16, head_dim is 8"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2]}},
            "1 factors are to divide 4 rotary frequencies",
        ),
    ],
)
def test_damaged_settings_are_refused_with_file_and_key(changes: dict[str, Any], said: str) -> None:
    """Not with a KeyError from somewhere inside."""
    with pytest.raises(ModelFileError, match=said):
        read(**changes)
