"""Processor time of the kernel's product of one or a few rows with a matrix in each width, larger than the caches.

    python -m tests.tools.kernel_speed [--rows 1,4] [--megabytes 512] [--rounds 5] [--inline]

Matrices have as many weights at every width; widths take turns, and the least of the rounds counts. The last column is
how many times as fast a width is as 4 bits in blocks of the same size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.runtime.native.binding import Binding, PackedMatrix
from edgeinfer.runtime.native.library import native_kernel

# Names of the formats, with their bits.
FORMATS = {"2": 2, "vectors": 2, "3": 3, "4": 4}
BLOCKS, K = (32, 64, 128), 4096
TILE, INLINE_BYTES = 32, 64
Kernel = tuple[Binding, str]


def matrix(name: str, block: int, weights: int, *, inline: bool) -> PackedMatrix:
    """A matrix of random bytes, with zero scales: the work is the same."""
    n, bits = weights // K // TILE * TILE, FORMATS[name]
    cells = n * (K // block)
    step = TILE * block * bits // 8 + (INLINE_BYTES if inline else 0)
    data = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), cells // TILE * step)
    if inline:
        data.reshape(-1, step)[:, :INLINE_BYTES] = 0
    scales = None if inline else np.zeros(cells, np.uint16)
    return PackedMatrix(n, K, bits, block, data, scales, vectors=name == "vectors")


def measure(kernel: Kernel, rows: int, block: int, weights: int, rounds: int, *, inline: bool) -> dict[str, float]:
    """Seconds by format."""
    binding, isa = kernel
    matrices = {name: matrix(name, block, weights, inline=inline) for name in FORMATS}
    x = np.random.default_rng(1).standard_normal((rows, K)).astype(np.float32)
    least = dict.fromkeys(FORMATS, float("inf"))
    for _ in range(rounds):
        for name, packed in matrices.items():
            started = time.process_time()
            binding.multiply(isa, packed, x)
            least[name] = min(least[name], time.process_time() - started)
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--megabytes", type=int, default=512, help="of the weights at 4 bits (default: 512)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inline", action="store_true", help="scales among the weights")
    parser.add_argument("--isa", help="instruction set (default: the best one)")
    args = parser.parse_args(arguments)
    kernel = native_kernel()
    isa, weights, lines = args.isa or kernel.isa, args.megabytes << 21, []
    for rows in map(int, args.rows.split(",")):
        for block in BLOCKS:
            found = measure((Binding(kernel.path), isa), rows, block, weights, args.rounds, inline=args.inline)
            lines += [
                (str(rows), str(block), name, f"{1e3 * s:.1f}", f"{weights / s / 1e9:.1f}", f"{found['4'] / s:.2f}")
                for name, s in found.items()
            ]
    header = ("rows", "block", "bits or format", "ms of processor time", "1e9 weights a second", "times 4 bits")
    print(isa, markdown_table(header, lines), sep="\n")


if __name__ == "__main__":
    main()
