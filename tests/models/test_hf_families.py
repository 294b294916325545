"""Every family's folder, made by transformers, gives transformers' logits and its greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megallm.models.load import load_model
from tests.models.engine_tokens import engine_tokens
from tests.models.plain_forward import plain_logits
from tests.models.tiny_hf import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    PROMPT,
    YARN_ROPE,
    HfModel,
    hf_continuation,
    hf_logits,
    hf_model,
    save,
)

# megatron's own modules say so to each other, at every step
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

NUM_TOKENS = 32
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
    "phi3": ("phi3", {}),
    "phi3, window, part of the head turns": (
        "phi3",
        {
            "sliding_window": 5,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
}


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, HfModel]:
    """Gives a case's folder and the model of transformers that it was saved from."""
    family, changes = CASES[request.param]
    model = hf_model(family, **changes)
    return save(model, tmp_path), model


def test_logits_and_greedy_tokens_equal_transformers(folder: tuple[Path, HfModel]) -> None:
    """One row in the wrong place, or one setting not seen, and a model talks nonsense or worse answers."""
    path, theirs = folder
    model, tokenizer = load_model(path, dtype=torch.float32, device="cpu")
    wanted = hf_continuation(theirs, PROMPT, NUM_TOKENS)
    ids = PROMPT + wanted
    torch.testing.assert_close(plain_logits(model, ids), hf_logits(theirs, ids), atol=1e-4, rtol=0)
    assert engine_tokens(model, tokenizer, PROMPT, NUM_TOKENS) == wanted
