"""Every family's folder, made by transformers, gives transformers' logits and its greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megallm.models.load import load_model
from tests.models.engine_tokens import SETTINGS, engine_tokens
from tests.models.plain_forward import plain_logits
from tests.models.tiny_hf import (
    BASE,
    DYNAMIC_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONG_ROPE,
    PROMPT,
    YARN_ROPE,
    hf_continuation,
    hf_logits,
    hf_model,
    save,
)

# megatron's own modules say so to each other, at every step
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

NUM_TOKENS = 32
TINY_EYES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}
MIXED_BY_SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: settings of many types
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, attention biases alone": ("llama", {"attention_bias": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama, linear rope, tied": ("llama", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "mistral, that sees": (
        "mistral3",
        {
            "text_config": BASE | {"model_type": "mistral", "head_dim": 16, "sliding_window": 7},
            "vision_config": TINY_EYES | {"model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, window on the last layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, yarn": (
        "qwen3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE | {"attention_factor": 1.2},
        },
    ),
    "qwen2 moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4 moe": (
        "glm4_moe",
        MIXED_BY_SIGMOID | {"use_qk_norm": True, "attention_bias": True, "head_dim": 16},
    ),
    "glm4 moe, plain": ("glm4_moe", MIXED_BY_SIGMOID | {"head_dim": 8, "first_k_dense_replace": 0}),
    "dots1": ("dots1", MIXED_BY_SIGMOID | {"head_dim": 16, "n_shared_experts": 2}),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3 moe, a dense layer, shares as they are": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, tied, window": (
        "mixtral",
        {"num_local_experts": 4, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, untied, llama 3 rope": (
        "smollm3",
        {"no_rope_layers": [1, 1, 0], "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gemma2, untied, no softcaps": (
        "gemma2",
        {
            "head_dim": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3, untied, a softcap, a full layer first, yarn": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": None},
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3, windows alone": ("gemma3_text", {"head_dim": 8, "sliding_window": 6}),
    "gemma3, that sees": (
        "gemma3",
        {
            "text_config": BASE | {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 3},
            "vision_config": TINY_EYES,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4, wholly turned, no biases": (
        "glm4",
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": LINEAR_ROPE | {"partial_rotary_factor": 1.0},
        },
    ),
    "gpt oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "ernie 4.5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed oss": ("seed_oss", {"head_dim": 8, "attention_out_bias": True}),
    "seed oss, no biases": ("seed_oss", {"head_dim": 16, "attention_bias": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite, biases": (
        "granite",
        {"residual_multiplier": 0.5, "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "starcoder2, no biases, untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "olmo3, yarn": (
        "olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_theta": 500.0}},
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 3}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC_ROPE}),
    "phi3": ("phi3", {}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
    ),
    "phi3, window, part of the head turns": (
        "phi3",
        {
            "sliding_window": 5,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {  # Any: the same
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 40}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 40},
    ),
}
"""Models that turn texts of more than 40 tokens otherwise than shorter ones."""


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    """One row in the wrong place, or one setting not seen, and a model talks nonsense or worse answers."""
    family, changes = CASES[case]
    theirs = hf_model(family, **changes)
    model, tokenizer = load_model(save(theirs, tmp_path), dtype=torch.float32, device="cpu")
    wanted = hf_continuation(theirs, PROMPT, NUM_TOKENS)
    ids = PROMPT + wanted
    torch.testing.assert_close(plain_logits(model, ids), hf_logits(theirs, ids), atol=1e-4, rtol=0)
    assert engine_tokens(model, tokenizer, PROMPT, NUM_TOKENS) == wanted


@pytest.mark.parametrize("case", BY_LENGTH)
def test_where_turning_goes_by_length_every_text_turns_as_the_longest(case: str, tmp_path: Path) -> None:
    """Keys lie in the cache already turned, so that a text that grows can't be turned anew.

    Fillers after a text make it transformers' longest, and no token before them sees them.
    """
    family, changes = BY_LENGTH[case]
    theirs = hf_model(family, **changes)
    model, tokenizer = load_model(save(theirs, tmp_path), dtype=torch.float32, device="cpu")
    longest: int = SETTINGS["max_sequence_length"]
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        padded = ids + [0] * (longest - len(ids))
        ids.append(int(hf_logits(theirs, padded)[len(ids) - 1].argmax()))
    assert engine_tokens(model, tokenizer, PROMPT, NUM_TOKENS) == ids[len(PROMPT) :]
    assert hf_continuation(theirs, PROMPT, NUM_TOKENS) != ids[len(PROMPT) :]
    for text in (ids[:40], ids[:41]):
        fresh = hf_model(family, **changes)  # one that has seen a longer text keeps to that one's angles
        torch.testing.assert_close(plain_logits(model, text), hf_logits(fresh, text), atol=1e-4, rtol=0)
