"""The peer's suite without the peer: its cases, its figures, and what it says where vLLM is missing."""

import argparse
from collections.abc import Sequence

import pytest

from benchmarks import offline_vllm
from benchmarks.load import Case
from benchmarks.offline_vllm import Opened, config_of, measured
from benchmarks.shapes import SHAPES


class Counting:
    """A peer that gives what is asked for, or a token less."""

    version = "1.2.3"

    def __init__(self, *, is_short: bool = False) -> None:
        self._is_short = is_short
        self.seen: list[tuple[list[int], list[int]]] = []

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> int:
        """Notes the lengths of prompts and outputs."""
        self.seen.append((list(map(len, prompts)), list(lengths)))
        return sum(lengths) - self._is_short


def test_every_case_runs_once_more_than_it_is_measured() -> None:
    """The first run captures and compiles."""
    peer = Counting()
    cases = [Case.parse("2:3:4"), Case.parse("1:5:6")]
    report = measured(Opened(peer, 1.5), "shape-0.6b", cases, repetitions=2)
    assert peer.seen == [([3, 3], [4, 4])] * 3 + [([5], [6])] * 3
    *rows, ready = report.results
    assert [(row["engine"], row["case"]) for row in rows] == [
        ("vLLM 1.2.3", "2:3:4"),
        ("vLLM 1.2.3", "1:5:6"),
    ]
    assert all(float(str(row["output_tok_s"])) > 0 for row in rows)
    assert ready["ready_s"] == 1.5


def test_a_peer_that_stops_early_is_no_measurement() -> None:
    """Fewer tokens in less time would look like speed."""
    with pytest.raises(RuntimeError, match="7 tokens came, 8 were asked for"):
        measured(Opened(Counting(is_short=True), 1.0), "shape-8b", [Case.parse("2:3:4")], repetitions=1)


def test_a_shape_is_written_as_the_peer_reads_it() -> None:
    """Another shape would cost something else."""
    config = config_of(SHAPES["shape-8b"])
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (8, 14336)
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (False, 128256)


def test_without_the_peer_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback, and no figures."""
    parser = argparse.ArgumentParser()
    offline_vllm.add_arguments(parser)
    report = offline_vllm.run(parser.parse_args([]))
    assert report.results == []
    assert report.notes == ["nothing measured: vLLM is not installed"]
    assert not capsys.readouterr().err
