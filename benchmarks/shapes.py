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


def random_model(
    name: str, *, dtype: "torch.dtype | None" = None, device: str | None = None
) -> tuple[Any, NumberTokenizer]:
    """Gives a model of `SHAPES`, on the GPU where there is one. Any: megatron's model is untyped."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron  # noqa: PLC0415

    size = SHAPES[name]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    with quiet_megatron():
        from megallm.models.gpt import random_gpt  # noqa: PLC0415

        ensure_process_groups()
        return random_gpt(size, dtype=kind, device=where), NumberTokenizer(size.vocab_size)
