"""What a launcher leaves in the environment."""

import pytest

from megallm.models.launched import Launched, launched


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched()),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Launched(1, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Launched(0, 2)),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Launched()),
        ({"RANK": ""}, Launched()),
    ],
    ids=["nothing", "torchrun", "another launcher", "half", "empty"],
)
def test_what_a_launcher_says_is_taken_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Launched
) -> None:
    """Half of it is somebody's leftover; waiting for ranks that nobody started would never end."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched() == expected


def test_a_rank_that_is_no_number_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's typing mistake."""
    monkeypatch.setenv("RANK", "$SLURM_PROCID")
    with pytest.raises(ValueError, match=r"the environment has RANK='\$SLURM_PROCID', a number is needed"):
        launched()
