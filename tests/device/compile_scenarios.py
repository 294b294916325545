"""What Triton's own compiler does with kernels launched by our functions, for a card that is not there.

Run as a program, since Triton's interpreter, which other tests are on, leaves its compiler broken behind:
prints what became of each of `SCENARIOS` as one JSON object.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what a kernel's parameters are is Triton's own matter)

import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megallm.core_async.device.tile_choice import Tiles
from megallm.core_async.device.triton_compile import compile_all, launch, launch_always
from megallm.core_async.device.triton_linear import Tiling, add_rms_norm_of_parts, few_rows
from megallm.core_async.device.triton_sampling import look_up
from megallm.core_async.device.triton_tiles import tiled_product
from megallm.core_async.device.triton_work import query_tiles, row_parts

AS_EXPECTED = "as expected"


def _add(numbers, count, amount: tl.constexpr):  # noqa: ANN001, ANN202 - a kernel
    places = tl.arange(0, 32)
    some = tl.load(numbers + places, mask=places < count)
    tl.store(numbers + places, some + amount, mask=places < count)


def _add_nonsense(numbers, count, amount: tl.constexpr):  # noqa: ANN001, ANN202 - a kernel
    tl.store(numbers, tl.nonsense(amount))  # pyright: ignore[reportAttributeAccessIssue] - the error to come


def most_shared(device: int) -> int:
    """Gives bytes of shared memory that no kernel here needs."""
    return 1 << 20


class Card:
    """A Hopper card as Triton sees it, on which a kernel does nothing but count."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.launchers: list[str] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        """Gives what is compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Gives the only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Gives the only one."""
        return 0

    def load_binary(self, *args: object) -> tuple[None, int, int, int, int]:
        """Gives no module that were to be unloaded, a function, registers, spills and most threads."""
        return None, 1, 16, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:  # Any: Triton's
        """Gives what launches the kernel."""
        self.launchers.append(src.name)
        return lambda *args: self.launched.append(src.name)


def num_compiled() -> int:
    """Gives how many kernels Triton's cache holds."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))


def num_threads() -> int:
    """Gives how many threads compile."""
    return sum(thread.name.startswith("megallm-compile") for thread in threading.enumerate())


def each_variant_is_compiled_once_and_none_is_launched(card: Card) -> None:
    """Layers launch the same kernels again and again, most of them before the first is compiled."""
    kernel, numbers = JITFunction(_add, do_not_specialize=["count"]), torch.zeros(32)

    def step() -> None:
        for count in (1, 2, 16):
            launch(kernel, (1,), numbers, count, amount=1)
            launch(kernel, (1,), numbers, count, amount=2)

    assert compile_all([step] * 5) == num_compiled() == 2
    assert card.launched == []
    assert card.launchers == ["_add"], "both take the same arguments"
    assert num_threads() == 0
    step()
    assert card.launched == ["_add"] * 6
    assert num_compiled() == 2


def what_gives_indices_is_launched_all_the_same(card: Card) -> None:
    """An embedding read at ids that nothing wrote would end the process."""
    kernel, numbers = JITFunction(_add), torch.zeros(32)
    assert compile_all([lambda: launch_always(kernel, (1,), numbers, 32, amount=1)] * 2) == 1
    assert card.launched == ["_add"] * 2
    assert num_compiled() == 1


def what_is_compiled_already_is_no_work(card: Card) -> None:
    """A second engine in a process starts at once."""
    kernel, numbers = JITFunction(_add), torch.zeros(32)
    launch(kernel, (1,), numbers, 32, amount=1)
    assert compile_all([lambda: launch(kernel, (1,), numbers, 32, amount=1)]) == 0
    assert card.launched == ["_add"]


def error_of_a_step_leaves_no_thread(card: Card) -> None:
    """Launches are launches again, of what was to be compiled by then, too."""
    kernel, numbers = JITFunction(_add), torch.zeros(32)

    def step() -> None:
        for amount in range(4):
            launch(kernel, (1,), numbers, 32, amount=amount)
        if not card.launched:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([step])
    assert num_threads() == 0
    launch(kernel, (1,), numbers, 32, amount=9)
    step()
    assert card.launched == ["_add"] * 5
    assert num_compiled() == 5


def error_of_a_compilation_is_raised(card: Card) -> None:
    """It names the line of the kernel, as where the kernel is launched."""
    wrong, right, numbers = JITFunction(_add_nonsense), JITFunction(_add), torch.zeros(32)

    def step() -> None:
        launch(right, (1,), numbers, 32, amount=1)
        launch(wrong, (1,), numbers, 32, amount=1)

    with pytest.raises(triton.CompilationError, match="nonsense"):
        compile_all([step])
    assert num_threads() == 0
    launch(right, (1,), numbers, 32, amount=1)
    assert card.launched == ["_add"]


def number_of_rows_makes_no_variant(card: Card) -> None:
    """Steps are of some thirty sizes; their rows are masked, or tiles, whatever their number."""
    weight, tables = torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(33, 4, dtype=torch.int32)
    tiles = Tiles(rows=64, outputs=32, depth=64, num_warps=4, num_stages=2)

    def step(count: int) -> None:
        rows, column = torch.zeros(count, 256, dtype=weight.dtype), torch.zeros(count + 1, dtype=torch.int32)
        parts = few_rows(rows, weight, Tiling(16, 64, 2, 4, 2))
        add_rms_norm_of_parts(parts, rows[:, :64], weight[0, :64], 1e-5)
        tiled_product(rows, weight, tiles)
        # (columns lie one after the other, so that they begin anywhere)
        look_up(column[:count], column[1:], torch.zeros(33, dtype=torch.int64), tables, block_size=16)
        row_parts(column[:count], column[:count], window=None, max_cuts=count, min_keys=64)
        query_tiles(column, column[:count], column[:count], num_queries=count, queries=16)

    assert compile_all([partial(step, count) for count in (32, 17, 20, 24)]) == num_compiled() == 6
    assert card.launched == ["_look_up"] * 4


SCENARIOS: dict[str, Callable[[Card], None]] = {
    scenario.__name__: scenario
    for scenario in (
        each_variant_is_compiled_once_and_none_is_launched,
        what_gives_indices_is_launched_all_the_same,
        what_is_compiled_already_is_no_work,
        error_of_a_step_leaves_no_thread,
        error_of_a_compilation_is_raised,
        number_of_rows_makes_no_variant,
    )
}


def outcome_of(scenario: Callable[[Card], None]) -> str:
    """Runs a scenario on a card of its own, with nothing in Triton's cache; gives what became of it."""
    card = Card()
    driver.set_active(card)  # pyright: ignore[reportArgumentType] - what Triton asks a driver for
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            scenario(card)
        except (AssertionError, triton.TritonError, KeyboardInterrupt, pytest.fail.Exception):
            return traceback.format_exc()
    return AS_EXPECTED


if __name__ == "__main__":
    compiler.max_shared_mem = most_shared
    json.dump({name: outcome_of(scenario) for name, scenario in SCENARIOS.items()}, sys.stdout)
