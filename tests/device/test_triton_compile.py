"""Kernels launched, and compiled beside each other; see compile_scenarios.py."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megallm.core_async.device import triton_compile
from tests.device.compile_scenarios import AS_EXPECTED, SCENARIOS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Gives what became of each scenario, in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.compile_scenarios"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_are_compiled_and_launched_as_the_scenario_says(
    scenario: str, outcomes: dict[str, str]
) -> None:
    """Both of Triton's ways, and every way out of them."""
    assert outcomes[scenario] == AS_EXPECTED


def test_kernels_that_are_interpreted_are_launched() -> None:
    """The interpreter compiles nothing; its kernels have the same form."""
    launched: list[object] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(*args: object, **options: object) -> None:
                launched.append((grid, args, options))

            return run

    triton_compile.launch(Interpreted(), (2, 3), "tensor", 5, WIDTH=8)
    triton_compile.launch_always(Interpreted(), (4,), "tensor")
    assert launched == [((2, 3), ("tensor", 5), {"WIDTH": 8}), ((4,), ("tensor",), {})]


def test_every_kernel_is_launched_by_these_functions() -> None:
    """One that was not would run on what the kernels before it, which did not run, have not written."""
    folder = Path(triton_compile.__file__).parent
    found = {
        f"{path.name}:{node.lineno}"
        for path in folder.glob("triton_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if path.name != "triton_compile.py"
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
    }
    assert found == set()
