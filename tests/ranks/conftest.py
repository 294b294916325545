"""Ranks for the tests that need real processes: torch is loaded once for all of them."""

from collections.abc import Generator

import pytest

from tests.ranks.processes import Ranks, forking


@pytest.fixture(scope="package")
def rank_processes() -> Generator[Ranks]:
    """Gives what starts ranks as torchrun does."""
    with forking() as ranks:
        yield ranks
