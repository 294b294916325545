"""The offline suite on a model of two tiny layers."""

import argparse
import importlib.util

import pytest

from benchmarks import offline
from benchmarks.report import Report
from tests.models.tiny_gguf import write_tiny

CASES = ("1:5:4", "3:7:5", "2:9:1")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
PARTS = {"plan", "prepare", "forward", "sample", "post"}


def options_of(*argv: str) -> argparse.Namespace:
    """Gives the options of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    offline.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Gives one run of three cases. A fixture, since importing the engines alone takes seconds."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny(path)
    argv = ["--model", str(path), "--cases", ",".join(CASES), "--threads", "1", "--cache-gb", "0.01"]
    return offline.run(options_of(*argv, "--repetitions", "1"))


def test_every_case_has_a_row_for_every_engine(report: Report) -> None:
    """A ratio counts only when both ran in the same run; without transformers that is said."""
    engines = ["megallm", "transformers"] if HAS_TRANSFORMERS else ["megallm"]
    pairs = [(case, engine) for case in CASES for engine in engines]
    assert [(row["case"], row["engine"]) for row in report.results] == pairs
    for row in report.results:
        check_row(row)
    assert len(report.notes) == (0 if HAS_TRANSFORMERS else 1)
    assert all("transformers is not installed" in note for note in report.notes)


def test_both_engines_do_the_same_work(report: Report) -> None:
    """An engine that generates other tokens, or fewer, is not faster."""
    agreement = [row[-1] for table in report.tables for row in table.rows if table.title == offline.RATIOS]
    assert agreement == (["4/4", "15/15", "2/2"] if HAS_TRANSFORMERS else [])


def test_the_cost_of_batch_invariance_is_measured_beside_the_default(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In the same run, on a model of its own, which an engine has to itself."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny(path)
    argv = ["--model", str(path), "--cases", "2:5:4", "--threads", "1", "--cache-gb", "0.01"]
    asked = options_of(*argv, "--repetitions", "1", "--engines", "megallm", "--batch-invariant")
    report = offline.run(asked)
    assert [row["engine"] for row in report.results] == ["megallm", offline.INVARIANT]
    (cost,) = [table for table in report.tables if table.title == offline.COST]
    ((case, *ratios, agreement),) = cost.rows
    assert (case, agreement) == ("2:5:4", "8/8")
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in ratios)


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
