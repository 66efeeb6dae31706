"""Processor time of the kernel's product of one row and of a few with a matrix of each width, far beyond the caches.

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

BITS, BLOCKS, K = (2, 3, 4), (32, 64, 128), 4096
TILE, INLINE_BYTES = 32, 64
Kernel = tuple[Binding, str]


def matrix(bits: int, block: int, weights: int, *, inline: bool) -> PackedMatrix:
    """A matrix of random bytes, with zero scales: the work is the same."""
    n = weights // K // TILE * TILE
    cells = n * (K // block)
    step = TILE * block * bits // 8 + (INLINE_BYTES if inline else 0)
    data = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), cells // TILE * step)
    if inline:
        data.reshape(-1, step)[:, :INLINE_BYTES] = 0
    return PackedMatrix(n, K, bits, block, data, None if inline else np.zeros(cells, np.uint16))


def measure(kernel: Kernel, rows: int, block: int, weights: int, rounds: int, *, inline: bool) -> dict[int, float]:
    """Seconds by bits."""
    binding, isa = kernel
    matrices = {bits: matrix(bits, block, weights, inline=inline) for bits in BITS}
    x = np.random.default_rng(1).standard_normal((rows, K)).astype(np.float32)
    least = dict.fromkeys(BITS, float("inf"))
    for _ in range(rounds):
        for bits, packed in matrices.items():
            started = time.process_time()
            binding.multiply(isa, packed, x)
            least[bits] = min(least[bits], time.process_time() - started)
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
                (str(rows), str(block), str(bits), f"{1e3 * s:.1f}", f"{weights / s / 1e9:.1f}", f"{found[4] / s:.2f}")
                for bits, s in found.items()
            ]
    header = ("rows", "block", "bits", "ms of processor time", "1e9 weights a second", "times 4 bits")
    print(isa, markdown_table(header, lines), sep="\n")


if __name__ == "__main__":
    main()
