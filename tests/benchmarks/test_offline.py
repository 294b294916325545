"""The offline suite on a model of two tiny layers."""

import argparse
import importlib.util
from pathlib import Path

import pytest

from benchmarks import offline
from tests.models.tiny_gguf import write_tiny

PARTS = {"plan", "prepare", "forward", "sample", "post"}


def options_of(*argv: str) -> argparse.Namespace:
    """Gives the options of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    offline.add_arguments(parser)
    return parser.parse_args(argv)


def test_megallm_runs_beside_transformers_on_the_same_weights(tmp_path: Path) -> None:
    """A ratio counts only when both did the same work in the same run; without transformers that is said."""
    write_tiny(tmp_path / "tiny.gguf")
    report = offline.run(
        options_of(
            *("--model", str(tmp_path / "tiny.gguf"), "--cases", "1:5:4,3:7:5,2:9:1", "--threads", "1"),
            *("--repetitions", "1", "--cache-gb", "0.01"),
        )
    )
    has_transformers = importlib.util.find_spec("transformers") is not None
    engines = ["megallm", "transformers"] if has_transformers else ["megallm"]
    cases = ["1:5:4", "3:7:5", "2:9:1"]
    assert [(row["case"], row["engine"]) for row in report.results] == [
        (c, e) for c in cases for e in engines
    ]
    for row in report.results:
        check_row(row)
    if has_transformers:
        agreement = [row[-1] for row in report.tables[-1].rows]
        assert (agreement, report.notes) == (["4/4", "15/15", "2/2"], [])
    else:
        assert len(report.notes) == 1
        assert "transformers is not installed" in report.notes[0]


def check_row(row: dict[str, object]) -> None:
    """Checks one result's columns."""
    assert row["shape"] == "tiny"
    for column in ("output_tok_s", "prompt_tok_s"):
        speed = row[column]
        assert isinstance(speed, float)
        assert speed > 0
    parts = row["step_ms"]
    assert isinstance(parts, dict)
    wanted = PARTS if row["engine"] == "megallm" else set[str]()
    has_decode_steps = not str(row["case"]).endswith(":1")
    assert parts.keys() == (wanted | {"total"} if has_decode_steps else wanted)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--cases", "1:2"), "case is '1:2'"),
        (("--engines", "megallm,vllm"), "engine is 'vllm'; it must be one of megallm, transformers"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(argv: tuple[str, ...], message: str) -> None:
    """Loading takes seconds, and a run takes minutes."""
    with pytest.raises(argparse.ArgumentError, match=message):
        options_of(*argv)
