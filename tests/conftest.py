"""What every test gets: both event loops, repeatable Hypothesis runs, a time limit, the demo model.

`pytest --hypothesis-profile=explore` searches with fresh random examples instead.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

import hypothesis
import pytest

# two threads of two test processes on two cores stall each other for seconds; set before torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter, on the CPU, except in the GPU run, which says `-m gpu`;
# Triton reads this while it is imported, which loading a test folder's conftest.py may do
if "gpu" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

TEST_LIMIT_S = 20.0
"""On a machine with nothing else to do; on a busier one as many times longer."""
GPU_TEST_LIMIT_S = 300.0
"""Kernels compile and graphs are captured inside the test."""
RAISE_AGAIN_S = 5.0
"""The first failure may be raised where Python drops it, as in a destructor."""

# deadline=None: a shared machine may stall any example
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Runs an async test once on each event loop."""
    return request.param


@pytest.fixture(scope="session")
def demo_model() -> tuple[Any, Any]:  # Any: megatron's model is untyped
    """Gives SmolLM2-135M-Instruct in float32 and its tokenizer; fetched once into the user's cache."""
    import torch

    from megallm import load_model

    return load_model("smollm2-135m", dtype=torch.float32)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fails a test that runs too long, with the stacks of all threads in its captured stderr.

    It ends the run too: an event loop stopped by a signal makes every later test on it fail.
    """
    limit_s = TEST_LIMIT_S if item.get_closest_marker("gpu") is None else GPU_TEST_LIMIT_S
    limit_s *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def fail(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        item.session.shouldfail = f"{item.nodeid} hung, and left the event loop as it was"
        pytest.fail(f"still running after {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit_s, RAISE_AGAIN_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
