"""The event loops that a thread may have to wake: each has its own way."""

from typing import Any

import pytest

type Backend = tuple[str, dict[str, Any]]  # Any: anyio's options of a backend

BACKENDS: list[Backend] = [
    ("asyncio", {"use_uvloop": False}),
    ("asyncio", {"use_uvloop": True}),
    ("trio", {}),
]

EVERY_LOOP = pytest.mark.parametrize("anyio_backend", BACKENDS, ids=["asyncio", "uvloop", "trio"])
"""Marks a test that is to run on each of them."""
