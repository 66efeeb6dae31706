"""What a request pays for another adapter than the last one's: milliseconds of the processor and of the clock.

    python -m tests.tools.adapter_switching [--switches N] [--prefix-cache]

The built-in model is loaded with two random adapters of rank 16. Before each switch its cache has 195 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import edgeinfer
from edgeinfer.option_types import LoadOptions
from tests.edgeinfer.test_adapters import write_adapter

_CACHED = 195


def _measured(switches: int, prefix_cache: bool) -> tuple[list[float], list[float]]:
    """Of each switch, milliseconds of the thread's processor time and of the clock."""
    processor, clock = [], []
    with tempfile.TemporaryDirectory() as folder:
        adapters = {name: write_adapter(Path(folder) / name, seed, 16) for seed, name in enumerate("ab")}
        options: LoadOptions = {"adapters": adapters, "context": 256, "threads": 1}
        if prefix_cache:
            options["prefix_cache"] = "20MB"
        with edgeinfer.load(**options) as model:
            engine = model._parts.engine
            for turn in range(switches):
                engine.feed([(7 * place + turn) % 300 for place in range(_CACHED)], np.zeros(0, np.int64))
                clocks, used = time.perf_counter(), time.thread_time()
                engine.use_adapter("ab"[turn % 2])
                processor.append(1e3 * (time.thread_time() - used))
                clock.append(1e3 * (time.perf_counter() - clocks))
    return processor, clock


def main() -> None:
    """Prints the median, the 99th of a hundred, and the longest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=400)
    parser.add_argument("--prefix-cache", action="store_true")
    args = parser.parse_args()
    for name, found in zip(("processor", "clock"), _measured(args.switches, args.prefix_cache), strict=True):
        middle, late, most = np.percentile(found, (50, 99, 100))
        print(f"{name}: median {middle:.3f} ms, p99 {late:.3f} ms, longest {most:.3f} ms of {len(found)}")


if __name__ == "__main__":
    main()
