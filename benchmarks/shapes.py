"""Models of known shapes with random weights: what a step costs depends on the shape alone.

Greedy output means nothing; end no output by a token. Knows shapes; knows no engine.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from megallm.models.checkpoint import Hyperparameters

if TYPE_CHECKING:
    import torch

SHAPES: Final = {
    "shape-8b": Hyperparameters(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=128256,
        max_positions=131072,
        rotary_base=500_000.0,
        norm_epsilon=1e-5,
        is_tied=False,
    ),
    "shape-0.6b": Hyperparameters(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=3072,
        vocab_size=151936,
        max_positions=131072,
        rotary_base=1_000_000.0,
        norm_epsilon=1e-6,
        is_tied=True,
    ),
}


class NumberTokenizer:
    """Writes token ids as numbers: text costs something, and no vocabulary is needed."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Gives the numbers of a text."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Gives ids as numbers."""
        return " ".join(map(str, ids))


def word_tokenizer(vocab_size: int) -> Any:
    """Gives a byte-level tokenizer of so many ids: bytes, then made-up words. Any: its library is untyped.

    Other processes can make the same, which the numbers of `NumberTokenizer` are not good for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - for this alone

    from megallm.models.base_tokenizer import SpecialIds  # noqa: PLC0415 - with it
    from megallm.models.tokenizer import ByteLevelTokenizer  # noqa: PLC0415 - with it

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120{number:x}" for number in range(vocab_size - len(symbols))]
    vocab = {symbol: token_id for token_id, symbol in enumerate([*symbols, *words])}
    backend: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return ByteLevelTokenizer(
        backend, special_ids=SpecialIds(eos=vocab_size - 1), chat_template=None, path="words"
    )


def random_model(
    shape: str | Hyperparameters, *, dtype: "torch.dtype | None" = None, device: str | None = None
) -> tuple[Any, NumberTokenizer]:
    """Gives a model of `SHAPES` or of a shape, on the GPU if there is one. Any: it is untyped."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron  # noqa: PLC0415 - with torch

    size = SHAPES[shape] if isinstance(shape, str) else shape
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    with quiet_megatron():
        from megallm.models.gpt import random_gpt  # noqa: PLC0415 - with torch

        ensure_process_groups()
        return random_gpt(size, dtype=kind, device=where), NumberTokenizer(size.vocab_size)
