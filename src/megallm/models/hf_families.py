"""Hugging Face's families of decoders: how each one's config.json and tensor names differ from Llama's.

A family is one entry of `FAMILIES`; what its config says beyond what all say is one function of hf_fields.py.
Knows Hugging Face's names; knows no file format and no megatron.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from megallm.core_async.errors import UnsupportedModelError
from megallm.models import hf_fields
from megallm.models.hf_windows import Fields
from megallm.models.settings_file import Settings


class Family(Struct, frozen=True, kw_only=True):
    """One family: what its config means where it says nothing, and what it has that Llama has not."""

    name: str
    fields: Callable[[Settings], Fields]
    """The hyperparameters beyond those that every family has."""
    defaults: Fields = {}
    """Settings where the config does not have them."""
    activations: tuple[str, ...] = ("silu", "swish")
    """Names of the one that is run."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names: ours, and what the folder has in its place, in the order of replacing."""
    stacked: Mapping[str, tuple[str, ...]] = {}
    """Tensors of a layer that hold several of ours, one below the other."""
    has_joint_experts: bool = False
    """All experts of a layer are in one tensor; see hf_joint_experts.py."""
    part: str | None = None
    """The object that has the decoder's settings, in the config of a model that sees or hears, too."""
    prefix: str = ""
    """What the names of the decoder's tensors begin with in such a model."""
    unread: tuple[str, ...] = ()
    """What the names of tensors that are not read begin with; `{num_layers}` is the number of layers."""

    def settings(self, config: Settings) -> Settings:
        """Gives the decoder's settings out of a config, defaults included."""
        return (config if self.part is None else config.inside(self.part)).over(self.defaults)


def family_of(settings: Settings) -> Family:
    """Gives the family of a config by its architecture.

    Raises: UnsupportedModelError naming the architecture and those that are supported.
    """
    names: list[Any] = settings.value_or("architectures", [])
    known = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if known is None:
        raise UnsupportedModelError(
            f"{settings.name_of('architectures')} is {names}, supported are {', '.join(FAMILIES)}; build the "
            "megatron-core model yourself and pass it to MegatronLLM"
        )
    return known


_OUTPUT_NORMS: Final = (
    (".attention_output_norm.", ".post_attention_layernorm."),
    (".mlp_output_norm.", ".post_feedforward_layernorm."),
)
_GEMMA2_NAMES: Final = ((".post_attention_layernorm.", ".pre_feedforward_layernorm."), *_OUTPUT_NORMS)
_GATE_UP: Final = {"mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}
_GLM_DEFAULTS: Final[Fields] = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}
_SHARED_EXPERTS: Final = ((".shared_expert.", ".shared_experts."),)
_OTHER_SENSES: Final = ("vision_tower.", "multi_modal_projector.")
_MISTRAL: Final = Family(name="mistral", fields=hf_fields.mistral, defaults={"sliding_window": 4096})
_GEMMA3: Final = Family(
    name="gemma3",
    fields=hf_fields.gemma3,
    defaults={  # Google's own configs say little more than what differs from these
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    activations=("gelu_pytorch_tanh",),
    renamed=_GEMMA2_NAMES,
)


FAMILIES: Final = {
    "LlamaForCausalLM": Family(name="llama", fields=hf_fields.llama),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL, part="text_config", prefix="language_model.", unread=_OTHER_SENSES
    ),
    "Qwen2ForCausalLM": Family(name="qwen2", fields=hf_fields.qwen2),
    "Qwen3ForCausalLM": Family(name="qwen3", fields=hf_fields.qwen3, defaults={"head_dim": 128}),
    "Qwen2MoeForCausalLM": Family(
        name="qwen2_moe", fields=hf_fields.qwen2_moe, defaults={"shared_expert_intermediate_size": 5632}
    ),
    "Qwen3MoeForCausalLM": Family(name="qwen3_moe", fields=hf_fields.qwen3_moe),
    "MixtralForCausalLM": Family(
        name="mixtral",
        fields=hf_fields.mixtral,
        defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        renamed=(
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
    ),
    "GemmaForCausalLM": Family(
        name="gemma",
        fields=hf_fields.gemma,
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        activations=("gelu_pytorch_tanh", "gelu"),  # the first is meant by the second, too
    ),
    "Gemma2ForCausalLM": Family(
        name="gemma2",
        fields=hf_fields.gemma2,
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256.0,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        activations=("gelu_pytorch_tanh",),
        renamed=_GEMMA2_NAMES,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3, part="text_config", prefix="language_model.", unread=_OTHER_SENSES
    ),
    "SmolLM3ForCausalLM": Family(
        name="smollm3",
        fields=hf_fields.smollm3,
        defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    ),
    "Phi3ForCausalLM": Family(
        name="phi3",
        fields=hf_fields.mistral,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        stacked={
            "self_attn.qkv_proj.weight": (
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
            ),
            **_GATE_UP,
        },
    ),
    "GlmForCausalLM": Family(name="glm", fields=hf_fields.glm, defaults=_GLM_DEFAULTS, stacked=_GATE_UP),
    "Glm4ForCausalLM": Family(
        name="glm4",
        fields=hf_fields.glm4,
        defaults=_GLM_DEFAULTS,
        renamed=(
            (".attention_output_norm.", ".post_self_attn_layernorm."),
            (".mlp_output_norm.", ".post_mlp_layernorm."),
        ),
        stacked=_GATE_UP,
    ),
    "Glm4MoeForCausalLM": Family(
        name="glm4_moe",
        fields=hf_fields.glm4_moe,
        defaults={
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        renamed=_SHARED_EXPERTS,
        unread=("model.layers.{num_layers}.",),  # it guesses a second token
    ),
    "Dots1ForCausalLM": Family(
        name="dots1",
        fields=hf_fields.dots1,
        defaults={"first_k_dense_replace": 0, "norm_topk_prob": False},
        renamed=_SHARED_EXPERTS,
    ),
    "GptOssForCausalLM": Family(
        name="gpt_oss",
        fields=hf_fields.gpt_oss,
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
        },
        renamed=((".mlp.gate.", ".mlp.router."),),
        has_joint_experts=True,
    ),
    "Ernie4_5ForCausalLM": Family(
        name="ernie4_5",
        fields=hf_fields.ernie4_5,
        defaults={
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "SeedOssForCausalLM": Family(
        name="seed_oss", fields=hf_fields.seed_oss, defaults={"head_dim": 128, "attention_bias": True}
    ),
    "GraniteForCausalLM": Family(name="granite", fields=hf_fields.granite),
    "Starcoder2ForCausalLM": Family(
        name="starcoder2",
        fields=hf_fields.starcoder2,
        defaults={"tie_word_embeddings": True},
        activations=("gelu_pytorch_tanh",),
        renamed=((".up_proj.", ".c_fc."), (".down_proj.", ".c_proj.")),
    ),
    "OlmoeForCausalLM": Family(name="olmoe", fields=hf_fields.olmoe, defaults={"rms_norm_eps": 1e-5}),
    "Olmo2ForCausalLM": Family(
        name="olmo2", fields=hf_fields.olmo2, defaults={"rms_norm_eps": 1e-5}, renamed=_OUTPUT_NORMS
    ),
    "Olmo3ForCausalLM": Family(
        name="olmo3",
        fields=hf_fields.olmo3,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        renamed=_OUTPUT_NORMS,
    ),
    "Exaone4ForCausalLM": Family(
        name="exaone4",
        fields=hf_fields.exaone4,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        renamed=_OUTPUT_NORMS,
    ),
}
"""By the name of transformers' class, as config.json has it under `architectures`."""
