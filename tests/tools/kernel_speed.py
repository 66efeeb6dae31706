"""Processor time of the kernel's product of one or a few rows with a matrix in each format, larger than the caches.

    python -m tests.tools.kernel_speed [--rows 1,4] [--megabytes 64] [--rounds 9] [--threads 1] [FORMAT ...]

Formats are those of the kernel, as 4/32 for 4 bits in blocks of 32, and the types of GGUF files. Matrices have as many
weights in every format. Formats take turns with the baseline, and the median of the rounds counts. A
thread has a matrix of its own; the slowest counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.runtime.native.binding import Binding, Floats, PackedMatrix
from edgeinfer.runtime.native.library import native_kernel

# The types by their numbers in spans.h: bits of the code, and bytes of the head of 8 blocks.
KINDS = {
    "q4_0": (1, 4, 512),
    "q4_1": (2, 4, 1024),
    "q5_0": (3, 5, 512),
    "q5_1": (4, 5, 1024),
    "q2_k": (5, 2, 640),
    "q3_k": (6, 3, 576),
    "q4_k": (7, 4, 512),
    "q5_k": (8, 5, 512),
    "q6_k": (9, 6, 576),
    "iq4_nl": (10, 4, 512),
    "iq4_xs": (11, 4, 320),
    "mxfp4": (12, 4, 256),
    "nvfp4": (13, 4, 512),
}
OWN = ("4/32", "4/128", "3/32", "2/64")
BASELINE, K, TILE, SPAN = "4/32", 4096, 32, 256


def matrix(name: str, n: int) -> PackedMatrix:
    """A matrix of random values, with scales near 1."""
    random = np.random.default_rng(0)
    if name in KINDS:
        kind, bits, head = KINDS[name]
        spans = n // TILE * (K // SPAN)
        tile = random.integers(0, 256, (64, head + bits * 1024), np.uint8)
        tile[:, :head] = 0x3C  # as float16 1.06, as a byte 60, as an exponent 2^-68
        return PackedMatrix(n, K, bits, 32, np.resize(tile, spans * tile.shape[1]), None, kind=kind)
    eight = name == "q8_0"
    bits, block = (8, 32) if eight else map(int, name.split("/"))
    planes = [
        np.resize(random.integers(0, 256, 1 << 20, np.uint8), n * K * min(bits, 4) // 8) for _ in range(1 + eight)
    ]
    scales = np.full(n * (K // block), 0x3C00 if eight else 0x3F80, np.uint16)
    return PackedMatrix(n, K, bits, block, planes[0], scales, low=planes[1] if eight else None, float16=eight)


def size(m: PackedMatrix) -> int:
    return sum(part.nbytes for part in (m.data, m.low, m.scales) if part is not None)


def timed(kernel: tuple[Binding, str], m: PackedMatrix, x: Floats) -> float:
    """Seconds of this thread."""
    started = time.thread_time()
    kernel[0].multiply(kernel[1], m, x)
    return time.thread_time() - started


def compare(
    kernel: tuple[Binding, str], names: Sequence[str], rows: int, n: int, rounds: int, threads: int
) -> dict[str, tuple[float, float]]:
    """Bytes per second and time relative to the baseline, by format."""
    x = np.random.default_rng(1).standard_normal((rows, K)).astype(np.float32)
    found = {}
    with ThreadPoolExecutor(threads) as pool:

        def slowest(copies: list[PackedMatrix]) -> float:
            return max(pool.map(lambda m: timed(kernel, m, x), copies))

        baseline = [matrix(BASELINE, n) for _ in range(threads)]
        for name in names:
            copies = [matrix(name, n) for _ in range(threads)]
            pairs = [(slowest(baseline), slowest(copies)) for _ in range(rounds)]
            found[name] = (size(copies[0]) / median(b for _, b in pairs), median(b / a for a, b in pairs))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="default: all")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--megabytes", type=int, default=64, help="of the weights at 4 bits (default: 64)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="instruction set (default: the best one)")
    args = parser.parse_args(arguments)
    own = native_kernel()
    kernel = (Binding(own.path), args.isa or own.isa)
    n = (args.megabytes << 21) // K // TILE * TILE
    names, lines = args.formats or [*OWN, "q8_0", *KINDS], []
    for rows in map(int, args.rows.split(",")):
        for name, (speed, times) in compare(kernel, names, rows, n, args.rounds, args.threads).items():
            bits, base = size(matrix(name, TILE)) * 8 / (TILE * K), size(matrix(BASELINE, TILE)) * 8 / (TILE * K)
            ms = bits / 8 * n * K / speed * 1e3
            cells = (f"{bits:.4g}", f"{ms:.1f}", f"{speed / 1e9:.1f}", f"{times:.2f}", f"{times * base / bits:.2f}")
            lines.append((str(rows), name, *cells))
    header = ("rows", "format", "bits", "ms", "GB/s", f"times {BASELINE}", "per byte")
    print(kernel[1], f"threads: {args.threads}", markdown_table(header, lines), sep="\n")


if __name__ == "__main__":
    main()
