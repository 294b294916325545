"""Checkpoints of every kind, as a megatron-core model and its tokenizer.

Imported without any of its readers: a server's processes take tokenizers from here, and no model.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megallm.models.load import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    """Gives `load_model`, importing its module the first time (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megallm.models.load import load_model

    return load_model
