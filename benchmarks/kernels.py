"""Attention kernels against the card: decode by the bytes it reads, prefill by the products it makes.

Needs a CUDA device. A case is `ROWSxLENGTH`: rows of so many tokens each, whose blocks are scattered; or
`ROWSxraggedLENGTH`, rows of 100 to LENGTH tokens. A decode row has one query, a prefill row is a whole
prompt. Each time is a replay of a CUDA graph of several launches, the median of several.
"""

import argparse
import random
from typing import Final

from benchmarks.load import SEED
from benchmarks.report import Cell, Report, Table, significant

DECODES: Final = (
    "1x576,1x8192,1x32768,8x4096,32x576,32x1024,40xragged1800,64x2048,128x576,128xragged1500,256x576,256x1024,"
    "256xragged1200"
)
PREFILLS: Final = "32x512,4x2048,1x8192"
BLOCK_SIZES: Final = "16,64,256"
READ_BYTES_PER_S: Final = 4.38e12
"""Of an NVIDIA H200, measured; other cards' floors scale with theirs."""
SHORTEST: Final = 100
"""Tokens of the shortest of ragged rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--decodes", default=DECODES, metavar="CASE,...", help="default: %(default)s")
    add("--prefills", default=PREFILLS, metavar="CASE,...", help="default: %(default)s")
    add("--block-sizes", default=BLOCK_SIZES, metavar="TOKENS,...", help="default: %(default)s")
    add("--heads", type=int, default=32, help="default: %(default)s")
    add("--kv-heads", type=int, default=8, help="default: %(default)s")
    add("--head-dim", type=int, default=128, help="default: %(default)s")


def lengths_of(case: str) -> list[int]:
    """Gives the rows' lengths; ragged ones are the same at every call."""
    rows, length = case.split("x")
    if not length.startswith("ragged"):
        return [int(length)] * int(rows)
    generator = random.Random(SEED)
    return [generator.randint(SHORTEST, int(length.removeprefix("ragged"))) for _ in range(int(rows))]


def run(options: argparse.Namespace) -> Report:
    """Measures every case with every block size."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    if not torch.cuda.is_available():
        return Report("kernels", [], [], ["nothing measured: torch finds no CUDA device"])
    from benchmarks.kernel_timing import decode_us, prefill_us  # noqa: PLC0415 - needs Triton
    from megallm.core_async.device.attention import LayerShape  # noqa: PLC0415 - with torch

    shape = LayerShape(
        options.heads, options.kv_heads, options.head_dim, options.head_dim, options.head_dim**-0.5
    )
    results: list[dict[str, object]] = []
    decodes: list[tuple[Cell, ...]] = []
    prefills: list[tuple[Cell, ...]] = []
    for block_size in map(int, options.block_sizes.split(",")):
        for case in options.decodes.split(","):
            lengths = lengths_of(case)
            floor_us = sum(lengths) * shape.num_kv_heads * shape.head_dim * 2 * 2 / READ_BYTES_PER_S * 1e6
            us = decode_us(lengths, shape, block_size=block_size)
            decodes.append((case, block_size, us, floor_us, us / floor_us))
            figures = {"us": significant(us), "floor_us": significant(floor_us)}
            results.append({"kind": "decode", "case": case, "block_size": block_size, **figures})
        for case in options.prefills.split(","):
            lengths = lengths_of(case)
            # two products a head, each over half of the square of the length
            flop = sum(2 * shape.num_heads * shape.head_dim * length * (length + 1) for length in lengths)
            us = prefill_us(lengths, shape, block_size=block_size)
            prefills.append((case, block_size, us, flop / us / 1e6))
            figures = {"us": significant(us), "tflop_s": significant(flop / us / 1e6)}
            results.append({"kind": "prefill", "case": case, "block_size": block_size, **figures})
    tables = [
        Table(
            "Decode attention, bfloat16, microseconds",
            ("case", "block_size", "us", "floor_us", "ratio"),
            decodes,
        ),
        Table("Attention of whole prompts, bfloat16", ("case", "block_size", "us", "tflop_s"), prefills),
    ]
    return Report("kernels", tables, results)
