"""What a step costs the engine itself: microseconds of its own work, and messages between its actors.

The engine is the real one, its pump, actors and rank thread; only the runner does nothing. The
batch stays at one size: every request is admitted in the first step, decodes in every step, and has
budget left at the end. No stop words, no streams, no prefix cache.

`us_per_step` is wall time from one launch to the next, the median over windows of steps. With a
runner that costs nothing the pump never has anything to wait for but the engine itself, so this is
all of its Python: planning, the result's way in, the detokeniser, the loop's own turns, the
hand-over to the rank's thread and back, and what that thread's Python takes of the GIL. It is the
step time below which no device can push the engine. Another process on the same cores lengthens it;
`best_us_per_step`, the fastest window, is the least disturbed one. `cpu_us_per_step` is the CPU
time of the loop's thread alone: what an embedding program loses of its loop. `messages_per_step` is
counted in a run of its own, an ask and its reply as two.
"""

import argparse
import contextlib
import importlib.util
import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Final

import anyio
from msgspec import Struct

from benchmarks.free_engine import FreeRunner, Mark, Meter, OneLetter, counted_messages
from benchmarks.load import SEED, random_prompts
from benchmarks.report import Report, Table, show_progress, significant
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.messages import NewRequest, RequestId, Sampling, TextSpec, pack_ints
from megallm.core_async.protocols import Runner

LOOPS: Final[dict[str, tuple[str, dict[str, bool]]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
"""anyio's backend and its options, by the name of the loop."""
PROMPT_LENGTHS: Final = (32, 64)
"""Spread, so that rows need their next block in different steps, as they do in a real batch."""
COUNTED_STEPS: Final = 200


class Schedule(Struct, frozen=True):
    """How many steps are run, and how many of them count."""

    num_warmup: int
    window: int
    num_windows: int

    @property
    def num_steps(self) -> int:
        """All steps, and a few that are in flight when the last window ends."""
        return self.num_warmup + self.window * self.num_windows + 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS), help="default: all")
    add(
        "--batches", nargs="+", type=int, default=[1, 64, 256, 512], metavar="N", help="default: 1 64 256 512"
    )
    add("--steps", type=int, default=1000, metavar="N", help="that count, of each row (default: %(default)s)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Measures every batch size on every loop."""
    schedule = schedule_of(options.steps)
    results: list[dict[str, object]] = []
    notes: list[str] = []
    for loop in options.loops:
        if loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
            notes.append("uvloop is left out: it is not installed (pip install 'megallm[fast]')")
            continue
        for batch in options.batches:
            show_progress(f"control_plane: {loop}, batch {batch}")
            results.append(measure(loop, batch, schedule, options.block_size))
    columns = ("loop", "batch", "us_per_step", "best_us_per_step", "cpu_us_per_step", "messages_per_step")
    rows: list[Any] = [tuple(row[column] for column in columns) for row in results]  # Any: cells, by column
    title = f"Engine work per step, blocks of {options.block_size} tokens"
    return Report("control_plane", [Table(title, columns, rows)], results, notes)


def schedule_of(num_steps: int) -> Schedule:
    """Gives windows of at most 50 steps that hold `num_steps`, after a warm-up of a tenth of them.

    Raises: ValueError for less than one step.
    """
    if num_steps < 1:
        raise ValueError(f"steps is {num_steps}; it must be at least 1")
    window = min(50, num_steps)
    return Schedule(num_warmup=max(10, num_steps // 10), window=window, num_windows=num_steps // window)


def measure(loop: str, batch: int, schedule: Schedule, block_size: int) -> dict[str, object]:
    """Gives one row: a batch size on a loop."""
    backend, backend_options = LOOPS[loop]

    def marks(schedule: Schedule, num_messages: Callable[[], int]) -> list[Mark]:
        work = partial(decode, FreeRunner(batch), batch, schedule, block_size, num_messages)
        return anyio.run(work, backend=backend, backend_options=backend_options)

    timed = list(pairwise(marks(schedule, lambda: 0)))
    wall_us = [(end.wall_s - start.wall_s) / schedule.window * 1e6 for start, end in timed]
    cpu_us = [(end.cpu_s - start.cpu_s) / schedule.window * 1e6 for start, end in timed]
    counting = Schedule(schedule.num_warmup, COUNTED_STEPS, 1)
    with counted_messages() as num_messages:
        start, end = marks(counting, num_messages)
    return {
        "loop": loop,
        "batch": batch,
        "us_per_step": significant(statistics.median(wall_us)),
        "messages_per_step": significant((end.num_messages - start.num_messages) / COUNTED_STEPS),
        "best_us_per_step": significant(min(wall_us)),
        "cpu_us_per_step": significant(statistics.median(cpu_us)),
    }


async def decode(
    runner: Runner, batch: int, schedule: Schedule, block_size: int, num_messages: Callable[[], int]
) -> list[Mark]:
    """Decodes `batch` requests until the schedule is over; gives its marks.

    Raises: an ExceptionGroup with EngineDeadError in it when the engine fails.
    """
    meters: list[Meter] = []

    def make_worker(runner: Runner) -> Meter:
        meter = Meter(
            runner,
            first_step=schedule.num_warmup,
            window=schedule.window,
            num_windows=schedule.num_windows,
            num_messages=num_messages,
        )
        meters.append(meter)
        return meter

    config = _config(batch, schedule, block_size)
    engine = Engine(config, runner, OneLetter(), make_worker=make_worker)
    async with anyio.create_task_group() as tasks:
        await tasks.start(engine.run)
        tasks.start_soon(engine.wait_for_shutdown)  # raises what kills the engine, so nothing waits for ever
        with contextlib.closing(await engine.submit(_requests(engine, batch, schedule))):
            await meters[0].is_over.wait()
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.preemptions) == (batch, 0, 0), (
                f"not {batch} rows: {stats}"
            )
        await engine.shutdown()
    return meters[0].marks


def _config(batch: int, schedule: Schedule, block_size: int) -> EngineConfig:
    """Gives limits that never bind: one step takes every prompt, and blocks last to the end."""
    max_length = PROMPT_LENGTHS[1] + schedule.num_steps
    return EngineConfig(
        block_size=block_size,
        num_blocks=batch * -(-max_length // block_size),
        max_requests=batch,
        max_tokens=batch * PROMPT_LENGTHS[1],
        max_sequence_length=max_length,
        vocab_size=OneLetter.vocab_size,
    )


def _requests(engine: Engine, batch: int, schedule: Schedule) -> list[NewRequest]:
    generator = random.Random(SEED)
    lengths = tuple(generator.randint(*PROMPT_LENGTHS) for _ in range(batch))
    return [
        _request(engine.next_request_id(), prompt, schedule.num_steps)
        for prompt in random_prompts(lengths, OneLetter.vocab_size)
    ]


def _request(request_id: RequestId, prompt: list[int], num_tokens: int) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        prompt=pack_ints(prompt),
        max_new_tokens=num_tokens,
        stop_token_ids=(),
        sampling=Sampling(temperature=0.0),
        text=TextSpec(request_id=request_id),
    )
