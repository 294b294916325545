"""Writes tiny random Hugging Face folders with transformers itself, one family each, seeded."""
# transformers is partly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplitter
from torch import Tensor

type HfModel = Any  # a model of transformers

VOCAB = 272
PROMPT = [5, 17, 200, 17, 9, 77, 131, 42, 6, 250, 99, 17]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.5, 3.0, 5.0, 9.0],
}


def hf_model(family: str, **changes: Any) -> HfModel:  # Any: settings of a config
    """Builds a family's model from one seed, its weights large enough that tokens differ."""
    settings: Any = transformers.AutoConfig.for_model(family, **(BASE | changes))
    settings._attn_implementation = "eager"  # noqa: SLF001 - transformers has no other way before a model is there
    sees = "vision_config" in changes
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model: HfModel = kind.from_config(settings).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3, generator=generator)
    return model


def save(model: HfModel, folder: Path, **options: Any) -> Path:  # Any: options of save_pretrained
    """Writes a model and a byte-level tokenizer of its vocabulary into a folder."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    write_tokenizer(folder, model.config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer of bytes: special tokens first, then the bytes, then fillers up to the size."""
    symbols = sorted(ByteLevelSplitter.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *symbols]
    tokens += [f"<filler {number}>" for number in range(vocab_size - len(tokens))]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend: Any = Tokenizer(BPE(vocabulary, []))  # Any: its methods have half of their types
    backend.pre_tokenizer = ByteLevelSplitter(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        },
        "pad_token": "<pad>",
    }
    template = "{% for message in messages %}<s>{{ message.content }}{% endfor %}"
    config = json.dumps({**names, "chat_template": template})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def change_config(folder: Path, **changes: Any) -> None:  # Any: JSON
    """Changes settings of a folder's config.json; None takes one out."""
    change_json(folder / "config.json", lambda values: values.update(changes))


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


@torch.inference_mode()
def hf_logits(model: HfModel, ids: list[int]) -> Tensor:
    """Gives transformers' logits at every position, `[tokens, vocab]`."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def hf_continuation(model: HfModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Gives transformers' greedy continuation, each token from a whole forward pass."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
