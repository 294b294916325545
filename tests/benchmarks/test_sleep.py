"""Sleep cannot be measured without a GPU, and says so."""

import argparse

import pytest
import torch

from benchmarks import sleep


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
def test_without_a_gpu_nothing_is_measured() -> None:
    """A table of zeros would look like a result."""
    parser = argparse.ArgumentParser()
    sleep.add_arguments(parser)
    report = sleep.run(parser.parse_args([]))
    assert (report.tables, report.results) == ([], [])
    assert "no CUDA device" in report.notes[0]
