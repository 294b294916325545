"""Prefix caching on a real model: the greedy ids with the cache are those without it."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from megallm.sync.llm import MegatronLLM
from tests.actors.cache_cases import CacheCase, cache_cases, run_case
from tests.small_llm import BLOCK_SIZE, make_llm, settings


@contextmanager
def small_llm(num_blocks: int, fields: dict[str, Any]) -> Generator[MegatronLLM]:  # Any: of many types
    """Runs the small model."""
    with make_llm(config=settings(num_blocks=num_blocks, **fields)) as llm:
        yield llm


@pytest.mark.parametrize("case", cache_cases(BLOCK_SIZE), ids=lambda case: case.name)
def test_no_id_differs_with_the_cache(case: CacheCase) -> None:
    """A block that is not what it is taken for shows in the first token computed behind it."""
    run_case(case, small_llm, BLOCK_SIZE)
