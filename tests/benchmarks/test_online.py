"""The online suite on one layer, and the load's own rules."""

import argparse
import json

import pytest

from benchmarks import kernels, online
from benchmarks.online_load import LoadCase
from benchmarks.report import Report


@pytest.fixture(scope="module")
def report() -> Report:
    """Gives one run of two cases. A fixture, since importing the engine alone takes seconds."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    online.add_arguments(parser)
    argv = ["--cases", "2:1:4:3:s,3:2:4:3:n", "--vocab", "300", "--layers", "1", "--replicas", "0"]
    return online.run(parser.parse_args([*argv, "--cache-gb", "0.05"]))


def test_every_case_is_served_and_measured(report: Report) -> None:
    """Streams and whole answers; every token asked for comes, or the load raises."""
    streamed, whole = report.results
    assert (streamed["case"], whole["case"]) == ("2:1:4:3:s", "3:2:4:3:n")
    assert all(float(str(row["output_tok_s"])) > 0 for row in report.results)
    assert "ttft_ms" in streamed
    assert "ttft_ms" not in whole


def test_prompts_are_the_same_each_time_and_differ_from_the_start() -> None:
    """The same work on every machine, and no prefix cache that shortens it."""
    case = LoadCase.parse("3:2:8:4:s")
    bodies = [json.loads(body) for body in case.bodies("model", 50_000)]
    assert bodies == [json.loads(body) for body in case.bodies("model", 50_000)]
    assert len({body["prompt"][0] for body in bodies}) == 3
    assert case.name == "3:2:8:4:s"


@pytest.mark.parametrize("text", ["1:2:3:4", "1:2:3:4:x", "a:2:3:4:s", "1:2:3:s"])
def test_a_case_that_is_none_is_refused_by_name(text: str) -> None:
    """Before a model is loaded."""
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        online.cases_of(text)


def test_ragged_rows_are_the_same_each_time() -> None:
    """The kernels' cases name work, not luck."""
    lengths = kernels.lengths_of("5xragged900")
    assert lengths == kernels.lengths_of("5xragged900")
    assert len(set(lengths)) > 1
    assert kernels.lengths_of("2x576") == [576, 576]
