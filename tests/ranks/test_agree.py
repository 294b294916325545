"""What ranks decide together before any starts: all have the same limits, or all have the same error."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import RankLostError
from megallm.core_async.ranks.agree import agreed, made_by_all
from tests.engines import engine_config
from tests.ranks.in_process import Collective, FakeRanks


def agreements(*derives: Callable[[], EngineConfig]) -> list[EngineConfig | str]:
    """Gives what each rank got."""
    collective = Collective()

    def agree(place: int) -> EngineConfig | str:
        try:
            return agreed([FakeRanks(place, collective)], derives[place])
        except (RankLostError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(derives)) as threads:
        return list(threads.map(agree, range(len(derives))))


def outcomes(*makes: Callable[[], str]) -> list[str]:
    """Gives what each rank got of what all make."""
    collective = Collective()

    def make(place: int) -> str:
        try:
            return made_by_all([FakeRanks(place, collective)], makes[place])
        except Exception as error:  # noqa: BLE001 - which one it is, is the test's matter
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(makes)) as threads:
        return list(threads.map(make, range(len(makes))))


def refuse() -> EngineConfig:
    """Finds a fault."""
    raise ValueError("block_size_tokens is 0")


def test_one_rank_asks_nobody() -> None:
    """There is nobody."""
    config = engine_config()
    assert agreed([], lambda: config) is config


def test_the_rank_with_the_least_room_decides() -> None:
    """A block has the same number on every rank."""
    expected = engine_config(num_blocks=30, max_requests=8, max_sequence_length=100)
    least = agreements(
        lambda: engine_config(num_blocks=30, max_requests=9, max_sequence_length=100),
        lambda: engine_config(num_blocks=64, max_requests=8, max_sequence_length=128),
    )
    assert least == [expected, expected]


def test_a_fault_on_one_rank_is_raised_on_all() -> None:
    """Else the others would wait for it for ever."""
    assert agreements(refuse, engine_config) == [
        "ValueError: block_size_tokens is 0",
        "RankLostError: rank 4 did not start: block_size_tokens is 0",
    ]


def test_different_settings_are_refused_on_all() -> None:
    """Plans would not fit the rank that has others."""
    refusal = "ValueError: rank 5 was given other settings than rank 4; give every rank of a model the same"
    for each in agreements(engine_config, lambda: engine_config(max_tokens=100)):
        assert isinstance(each, str)
        assert each.startswith(refusal)


def test_each_rank_gets_what_it_made_once_all_have() -> None:
    """Engines differ from rank to rank, and need no agreement but that there are all of them."""
    assert made_by_all([], lambda: "alone") == "alone"
    assert outcomes(lambda: "leader", lambda: "follower") == ["leader", "follower"]


@pytest.mark.parametrize("character", ["x", "é", "😀", "\ud800", "😀\0"])
def test_an_error_of_any_length_and_script_is_heard_of(character: str) -> None:
    """One that fits no record would be raised on its rank alone, and the others wait for ever."""

    class UnnameableError(Exception):
        pass

    UnnameableError.__name__ = "É" * 1000

    def refuse_at_length() -> str:
        raise UnnameableError(character * 5000)

    own, others = outcomes(refuse_at_length, lambda: "made")
    assert own == f"{'É' * 1000}: {character * 5000}"
    said = character if character.isprintable() else character.replace("\ud800", "?")
    assert others.startswith(f"RankLostError: rank 4 did not start: {said * 50}")
