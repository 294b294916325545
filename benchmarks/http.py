"""What the HTTP server costs: CPU a streamed token and a request, in front ends and engine, and latencies.

Engine, front ends and their sockets are the real ones; only the model costs nothing, and is as fast
as `--step-ms` says. The clients are one process more. CPU time is that of the processes, so other
work on the machine lengthens it by its cache misses alone; latencies it lengthens at will.

`tok_per_cpu_s` is streamed tokens for each second of CPU that the front ends took, all of them
together; `engine_core_pct` is the share of one core that the engine's process took, the rank's thread
and its loop, for this traffic. A token that is not written on its own is written with the next one:
`writes_per_tok` says how many were.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.free_engine import FreeStep
from benchmarks.http_load import Times
from benchmarks.report import Report, Table, show_progress, significant
from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine
from megallm.core_async.kit.foreign import wait_for
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import Ints, StepPlan, StepResult, pack_ints
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.serve_config import ServeConfig
from megallm.http.server import Server
from megallm.models.base_tokenizer import SpecialIds
from megallm.models.tokenizer import ByteLevelTokenizer

ROOT: Final = Path(__file__).parents[1]
MAX_REQUESTS: Final = 1024
NUM_WORDS: Final = 1000
TICK: Final = os.sysconf("SC_CLK_TCK")


class PacedRunner:
    """A model that takes its time and no CPU: every row's token is a word, another one in each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = 0.0
        self._words = pack_ints([index % NUM_WORDS for index in range(MAX_REQUESTS + NUM_WORDS)])

    @property
    def runs_at_launch(self) -> bool:
        """A step is over when it has been launched."""
        return True

    def start(self) -> None:
        """Binds nothing."""

    def launch(self, plan: StepPlan) -> FreeStep:
        """Waits for the step's time, and gives its result."""
        now = time.perf_counter()
        self._next_s = max(now, self._next_s + self._step_s)
        time.sleep(self._next_s - now)  # it stands for the device, on the thread that waits for one
        start = 4 * (plan.step % NUM_WORDS)
        return FreeStep(StepResult(plan.step, Ints(self._words[start : start + 4 * plan.samples.count(1)])))

    def release_cache(self, kept: Ints) -> None:
        """Has no cache to release."""

    def restore_cache(self) -> None:
        """Has no cache to restore."""

    def close(self) -> None:
        """Frees nothing."""


def words_tokenizer() -> ByteLevelTokenizer:
    """Gives a tokenizer whose tokens are words, as most of a real one's are."""
    vocab = {f"\u0120word{index}": index for index in range(NUM_WORDS)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=False, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends: list[Any] = [AddedToken("<|end|>", normalized=False, special=True)]  # Any: the library has no types
    backend.add_special_tokens(ends)
    return ByteLevelTokenizer(backend, special_ids=SpecialIds(eos=NUM_WORDS), path="words")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--streams", nargs="+", type=int, default=[1, 32, 256, 1000], metavar="N")
    add("--front-ends", type=int, default=1, metavar="N", help="0 serves in the engine's loop (default: 1)")
    add("--step-ms", type=float, default=20.0, metavar="MS", help="of the model (default: %(default)s)")
    add("--tokens", type=int, default=30_000, metavar="N", help="of a row's streams (default: %(default)s)")
    add("--requests", type=int, default=32, metavar="N", help="clients of one-token requests (default: 32)")


def run(options: argparse.Namespace) -> Report:
    """Measures each number of streams, then short requests."""
    results: list[dict[str, object]] = []
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    for step_ms in (options.step_ms, 0.0):
        results += anyio.run(
            measure, options, step_ms, backend="asyncio", backend_options={"use_uvloop": has_uvloop}
        )
    columns = tuple(results[0])
    rows: list[Any] = [tuple(row[column] for column in columns) for row in results]  # Any: cells, by column
    title = f"Streams and requests over HTTP, {options.front_ends} front-end processes"
    return Report("http", [Table(title, columns, rows)], results)


async def measure(options: argparse.Namespace, step_ms: float) -> list[dict[str, object]]:
    """Gives the rows of one speed of the model."""
    config = EngineConfig(
        block_size=16,
        num_blocks=MAX_REQUESTS * 64,
        max_requests=MAX_REQUESTS,
        max_tokens=64 * MAX_REQUESTS,
        max_sequence_length=1024,
        vocab_size=NUM_WORDS + 1,
    )
    tokenizer = TokenizerAdapter(words_tokenizer())
    engine = Engine(config, PacedRunner(step_ms / 1e3), tokenizer)
    rows: list[dict[str, object]] = []
    async with anyio.create_task_group() as tasks:
        await tasks.start(engine.run)
        settings = ServeConfig(host="127.0.0.1", port=0, frontend_replicas=options.front_ends)
        matchers = Matchers(tokenizer, config.vocab_size)
        server = Server(engine, tokenizer, settings, matchers, ends_with_engine=False)
        tasks.start_soon(run_to_end, server, engine)
        await wait_for(server.started)
        for num_streams in options.streams:
            num_tokens = max(64, min(256, options.tokens // num_streams))
            show_progress(f"http: {num_streams} streams, steps of {step_ms:g} ms")
            rows.append(await row(server, "stream", num_streams, num_tokens, step_ms))
        if not step_ms:
            rows.append(await row(server, "request", options.requests, 1, step_ms))
        server.begin_stop(0.0)
    return rows


async def run_to_end(server: Server, engine: Engine) -> None:
    """Runs a server, and stops the engine after it."""
    await server.run()
    await engine.shutdown()


async def row(
    server: Server, kind: str, num_clients: int, num_tokens: int, step_ms: float
) -> dict[str, object]:
    """Runs one load and gives its figures."""
    num_rounds = 1 if kind == "stream" else 40
    command = [sys.executable, "-m", "benchmarks.http_load", "--port", str(server.port)]
    command += ["--clients", str(num_clients), "--rounds", str(num_rounds), "--tokens", str(num_tokens)]
    command += ["--stream"] if kind == "stream" else []
    with cpu_of(server.pids) as cpu:
        outcome = await to_thread.run_sync(partial(subprocess.run, command, stdout=PIPE, check=True))
    times = msgspec.json.decode(outcome.stdout, type=Times)
    front_s, engine_s = cpu
    return {
        "kind": kind,
        "step_ms": step_ms,
        "clients": num_clients,
        "tok_s": significant(times.num_tokens / times.wall_s),
        "requests_s": significant(times.num_requests / times.wall_s),
        "tok_per_cpu_s": significant(times.num_tokens / front_s) if front_s else None,
        "requests_per_cpu_s": significant(times.num_requests / front_s) if front_s else None,
        "engine_core_pct": significant(100 * engine_s / times.wall_s),
        "writes_per_tok": significant(times.num_writes / times.num_tokens),
        "first_p50_ms": significant(times.first_token_ms["p50"]),
        "first_p99_ms": significant(times.first_token_ms["p99"]),
        "between_p50_ms": significant(times.between_ms["p50"]),
        "between_p99_ms": significant(times.between_ms["p99"]),
    }


@contextmanager
def cpu_of(pids: set[int]) -> Generator[list[float]]:
    """Gives a list that after the block holds the CPU seconds of some processes, and of this one."""
    used: list[float] = []
    before, own = sum(map(cpu_s, pids)), time.process_time()
    yield used
    used += [sum(map(cpu_s, pids)) - before, time.process_time() - own]


def cpu_s(pid: int) -> float:
    """Gives the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
