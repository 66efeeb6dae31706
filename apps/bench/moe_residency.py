"""Tokens per second of a mixture of experts against the share of its experts in memory, each within an enforced budget.

python -m edgeinfer.apps.bench.moe_residency BUNDLE [--shares 0.75 0.5 0.25] [--rounds 2] [--json OUT] [--svg OUT]

Every share is a process of its own in a control group whose limit is the plan's own bytes, so pages that are dropped
are gone from the system's cache too where memory is short. Text is drawn at temperature 1, as random models repeat
themselves otherwise. Knows nothing of how experts are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.enforced import drop_cached, enclosure, set_limit
from edgeinfer.apps.bench.plots import Chart, Line, chart_svg
from edgeinfer.apps.bench.tables import print_table
from edgeinfer.apps.bench.vocabulary import pseudo_text
from edgeinfer.apps.bench.watch import watch
from edgeinfer.errors import UsageError

__all__ = ["ResidencyPoint", "main", "measure_residency"]

_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
_PROMPT = 32
_STREAMED = "streamed"


@dataclass(frozen=True)
class ResidencyPoint:
    """One share of the experts in memory.

    Attributes:
        share: of the experts' bytes that may be resident; 1 is all, 0 weights that are streamed.
        budget_bytes: enforced, the plan's own.
        peak_bytes: most that the process had resident.
        counted_bytes: most that the system counted, pages of files that were only read included.
        tokens_per_second: of the reply, the median of the rounds.
        hit_rate: experts that were in memory when they were chosen; None where all are.
        chunk_sparsity: of the reply, by tokens in a run.
        reason: why there was no reply; empty where there was.
    """

    share: float
    budget_bytes: int = 0
    peak_bytes: int = 0
    counted_bytes: int = 0
    tokens_per_second: float = 0.0
    hit_rate: float | None = None
    token_sparsity: float = 0.0
    chunk_sparsity: dict[str, float] | None = None
    reason: str = ""


def _options(model: str, share: float) -> dict[str, Any]:
    """How a share is loaded.

    Raises:
        UsageError: the model has no experts that can be left out of memory.
    """
    if share == 0:
        return {"weights": _STREAMED}
    if share >= 1:
        return {}
    total = edgeinfer.plan(model).terms.get("experts", 0)
    if not total:
        raise UsageError(f"{model} has no experts to leave out of memory.", "Give a native bundle of a mixture.")
    return {"weights": "experts", "expert_memory": round(share * total)}


def run_share(model: str, share: float, tokens: int, limit: dict[str, str], spec: str) -> dict[str, Any]:
    """In a process of its own: loads within a budget that is just enough, and replies twice; the second counts."""
    options: dict[str, Any] = {"context": 512, "threads": 1, "remember": False, "speculation": spec} | _options(
        model, share
    )
    plan = edgeinfer.plan(model, **options)
    # What planning without a budget takes beyond is found again when the budget is checked.
    budget = plan.minimum_bytes if share == 0 else round(1.02 * plan.planned_bytes)
    set_limit(limit, budget, mapped=sum(plan.footprint.file.values()))
    with edgeinfer.load(model, memory=budget, **options) as loaded:
        prompt = loaded.tokenize(pseudo_text(_PROMPT, 1))[:_PROMPT]
        how = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
        loaded.generate(prompt, max_tokens=tokens // 2, **how)
        result = loaded.generate(prompt[::-1], max_tokens=tokens, **how)
    assert result.experts is not None
    return {
        "budget_bytes": budget,
        "peak_bytes": result.memory.peak_rss_bytes,
        "tokens_per_second": result.timings.tokens_per_second,
        "hit_rate": result.experts.hit_rate,
        "token_sparsity": result.experts.token_sparsity,
        "chunk_sparsity": {str(size): share for size, share in result.experts.chunk_sparsity.items()},
    }


def measure_residency(
    model: str, shares: Sequence[float], tokens: int, rounds: int, spec: str = "off"
) -> list[ResidencyPoint]:
    """Every share once per round, in turns."""
    found: dict[float, list[ResidencyPoint]] = {share: [] for share in shares}
    for _ in range(rounds):
        for share in shares:
            found[share].append(_run(model, share, tokens, spec))
    return [_median(points) for points in found.values()]


def _run(model: str, share: float, tokens: int, spec: str) -> ResidencyPoint:
    drop_cached(Path(model))
    with enclosure() as place:
        job = json.dumps([model, share, tokens, place.limit, spec])
        command = [sys.executable, "-m", "edgeinfer.apps.bench.moe_residency", "--job", job]
        ended = watch(place.command(command), child_environment())
        counted = place.peak_bytes()
    if ended.returncode != 0 or ended.watched is None:
        return ResidencyPoint(share, reason=ended.reason)
    fields = json.loads(ended.watched.stdout)
    fields["peak_bytes"] = max(fields["peak_bytes"], ended.watched.peak_rss_bytes)
    return ResidencyPoint(share, counted_bytes=counted, **fields)


def _median(points: Sequence[ResidencyPoint]) -> ResidencyPoint:
    """The round of median speed, of those that gave a reply."""
    good = sorted((point for point in points if not point.reason), key=lambda point: point.tokens_per_second)
    return good[len(good) // 2] if good else points[0]


def _print(points: Sequence[ResidencyPoint]) -> None:
    rows = [
        (
            "streamed" if p.share == 0 else f"{p.share:.0%}",
            p.reason or f"{p.tokens_per_second:.1f}",
            "-" if p.hit_rate is None else f"{p.hit_rate:.1%}",
            f"{p.budget_bytes / 1e6:.1f}",
            f"{p.peak_bytes / 1e6:.1f}",
            f"{p.counted_bytes / 1e6:.1f}",
            " ".join(f"{size}:{value:.2f}" for size, value in (p.chunk_sparsity or {}).items()),
        )
        for p in points
    ]
    header = ("experts in memory", "tok/s", "hits", "budget MB", "peak RSS MB", "counted MB", "chunk sparsity")
    print_table("Experts in memory", header, rows)


def _chart(points: Sequence[ResidencyPoint]) -> str:
    """Speed against the share in memory, as SVG."""
    mapped = sorted((100 * p.share, p.tokens_per_second) for p in points if p.share > 0 and not p.reason)
    lines = [Line("experts in memory, the others in their file", tuple(mapped))]
    lines += [
        Line("all weights dropped behind every pass", ((0.0, p.tokens_per_second),))
        for p in points
        if p.share == 0 and not p.reason
    ]
    return chart_svg(Chart("Decoding against experts in memory", "experts in memory, %", "tokens/s", tuple(lines)))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?")
    parser.add_argument("--shares", type=float, nargs="+", default=[*_SHARES, 0.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--spec", default="off")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the speeds there")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job is not None:
        print(json.dumps(run_share(*json.loads(args.job))))
        return
    points = measure_residency(args.bundle, args.shares, args.tokens, args.rounds, args.spec)
    _print(points)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", encoding="utf-8")
    if args.svg is not None:
        args.svg.write_text(_chart(points), encoding="utf-8")


if __name__ == "__main__":
    main()
