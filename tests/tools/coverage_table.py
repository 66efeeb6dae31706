"""Show by room and module which share of a former suite's lines the tiers execute, and which lines were lost.

    python -m tests.tools.coverage_table --former OLD --fast FAST --full FAST REST

Each is one or more of coverage.py's data files, taken as tests.tools.coverage_data says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.tools.coverage_data import ROOMS, Lines, lines_of

ENOUGH = 0.9  # of a module's lines, in the fast tier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("former", "fast", "full"):
        parser.add_argument(f"--{name}", nargs="+", type=Path, required=True, metavar="DATA")
    args = parser.parse_args()
    for line in table(*(lines_of(getattr(args, name)) for name in ("former", "fast", "full"))):
        print(line)


def table(former: Lines, fast: Lines, full: Lines) -> Iterator[str]:
    """The report, line by line, in Markdown."""
    former = {name: lines for name, lines in former.items() if name.partition("/")[0] in ROOMS and lines}
    yield "| folder | modules | lines of the former suite | fast | full | modules below 90% in the fast tier |"
    yield "|---|---:|---:|---:|---:|---:|"
    for folder, group in groupby(sorted(former, key=folder_of), folder_of):
        yield row(folder, list(group), former, fast, full)
    yield row("all", sorted(former), former, fast, full)
    yield ""
    yield "Modules below 90% in the fast tier:"
    for name in sorted(former):
        if (share := executed(name, former, fast)) < ENOUGH:
            yield f"- {name}: {share:.0%} of {len(former[name])}"
    yield "Lines that the former suite executed and the full tier does not:"
    for name in sorted(former):
        if lost := former[name] - full.get(name, set()):
            yield f"- {name}: {', '.join(map(str, sorted(lost)))}"


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def row(title: str, names: list[str], former: Lines, fast: Lines, full: Lines) -> str:
    lines = sum(len(former[name]) for name in names)
    shares = [sum(len(former[name] & tier.get(name, set())) for name in names) / lines for tier in (fast, full)]
    below = sum(executed(name, former, fast) < ENOUGH for name in names)
    return f"| {title} | {len(names)} | {lines} | {shares[0]:.1%} | {shares[1]:.1%} | {below} |"


def executed(name: str, former: Lines, tier: Lines) -> float:
    """The share of a module's former lines that a tier executes."""
    return len(former[name] & tier.get(name, set())) / len(former[name])


if __name__ == "__main__":
    main()
