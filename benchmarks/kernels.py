"""Decode attention against the bytes of keys and values at the card's read speed.

Needs a CUDA device. A case is `ROWSxLENGTH`: rows of so many cached tokens each, whose blocks are scattered.
Each time is a replay of a CUDA graph of several launches, the median of several.
"""

import argparse
from typing import Final

from benchmarks.report import Cell, Report, Table, significant

CASES: Final = "1x576,1x8192,1x32768,8x4096,32x576,32x1024,64x2048,128x576,256x576,256x1024"
BLOCK_SIZES: Final = "16,64,256"
READ_BYTES_PER_S: Final = 4.38e12
"""Of an NVIDIA H200, measured; other cards' floors scale with theirs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--cases", default=CASES, metavar="ROWSxLENGTH,...", help="default: %(default)s")
    add("--block-sizes", default=BLOCK_SIZES, metavar="TOKENS,...", help="default: %(default)s")
    add("--heads", type=int, default=32, help="default: %(default)s")
    add("--kv-heads", type=int, default=8, help="default: %(default)s")
    add("--head-dim", type=int, default=128, help="default: %(default)s")


def run(options: argparse.Namespace) -> Report:
    """Measures every case with every block size."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    if not torch.cuda.is_available():
        return Report("kernels", [], [], ["nothing measured: torch finds no CUDA device"])
    from benchmarks.kernel_timing import decode_us  # noqa: PLC0415 - needs Triton

    results: list[dict[str, object]] = []
    rows: list[tuple[Cell, ...]] = []
    for case in options.cases.split(","):
        num_rows, length = map(int, case.split("x"))
        num_bytes = num_rows * length * options.kv_heads * options.head_dim * 2 * 2
        floor_us = num_bytes / READ_BYTES_PER_S * 1e6
        for block_size in map(int, options.block_sizes.split(",")):
            us = decode_us(
                [length] * num_rows,
                block_size=block_size,
                heads=options.heads,
                kv_heads=options.kv_heads,
                head_dim=options.head_dim,
            )
            rows.append((case, block_size, us, floor_us, us / floor_us))
            results.append(
                {
                    "case": case,
                    "block_size": block_size,
                    "us": significant(us),
                    "floor_us": significant(floor_us),
                }
            )
    columns = ("case", "block_size", "us", "floor_us", "ratio")
    return Report("kernels", [Table("Decode attention, bfloat16, microseconds", columns, rows)], results)
