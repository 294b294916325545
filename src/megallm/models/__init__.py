"""Checkpoints of every kind, as a megatron-core model and its tokenizer.

Importing this imports neither torch nor megatron-core; `load_model` does.
"""

from megallm.models.load import load_model

__all__ = ["load_model"]
