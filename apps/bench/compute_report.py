"""What less compute costs and gains, as tables and as a chart; knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.tables import print_table

__all__ = [
    "HEADER",
    "comparison_rows",
    "compute_chart",
    "dominates",
    "floor_header",
    "floor_rows",
    "point_rows",
    "print_compute",
]

HEADER = (
    "policy", "level", "nats", "perplexity", "large share", "skipped", "predicted", "ms/token", "faster", "right"
)  # fmt: skip
# Columns of what is compared with what.
_COMPARED = {"entropy": ("share", "entropy", "random"), "calibrated": ("speedup", "unified", "calibrated")}
# What tells the levels of a policy apart, and how it is written.
_LEVELS = {"compute_share": "share {:.2f}", "compute_speedup": "{:.2f}x", "exit_confidence": "p {:.2f}"}


def print_compute(data: Mapping[str, Any]) -> None:
    """The JSON of a run."""
    drafter = f", with {data['drafter']}" if data["drafter"] else ""
    first = data["points"][0]
    title = f"{data['model']}{drafter}: {first['tokens']} tokens of {data['text']}"
    print_table(title, HEADER, point_rows(data["points"]))
    for title, header, rows in comparison_rows(data):
        print_table(title, header, rows)
    if data["floors"]:
        print_table("Floors, on texts that nothing was calibrated with", floor_header(), floor_rows(data))
    for policy, reason in data["skipped"].items():
        print(f"{policy}: skipped: {reason}")


def comparison_rows(data: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Each comparison with what a policy has to beat: its title, header and rows."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    for name, columns in _COMPARED.items():
        pairs = data["dominance"][name]
        better = sum(dominates(name, pair) for pair in pairs)
        rows = [(f"{pair[columns[0]]:.2f}", *(f"{pair[column]:.4f}" for column in columns[1:])) for pair in pairs]
        if pairs:
            found.append((f"{name}: less divergence at {better} of {len(pairs)} levels", columns, rows))
    return found


def floor_header() -> tuple[str, ...]:
    """Names of the columns of `floor_rows`."""
    return ("policy", "level", "floor", "nats", "worst story", "above the floor", "still reduced")


def floor_rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each policy with a floor of the JSON."""
    return [
        (
            each["policy"],
            _level(each["options"]),
            f"{each['floor']:g}",
            f"{each['divergence']:.4f}",
            f"{each['worst']:.4f}",
            f"{each['above']} of {each['stories']}",
            f"{each['reduced']:.0%}",
        )
        for each in data["floors"]
    ]


def dominates(name: str, pair: Mapping[str, float]) -> bool:
    """Whether a policy diverges less than what it is compared with."""
    return pair[name] < pair["random" if name == "entropy" else "unified"]


def point_rows(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each point of the JSON."""
    return [
        (
            each["policy"],
            _level(each["options"]),
            f"{each['divergence']:.4f}",
            f"{each['perplexity']:.3f}",
            f"{1 - each['reduced']:.0%}",
            f"{each['skipped']:.0%}",
            _times(each["predicted_speedup"]),
            "" if each["per_token_ms"] is None else f"{each['per_token_ms']:.3f}",
            _times(each["speedup"]),
            f"{each['right']}/{each['questions']}" if each["questions"] else "",
        )
        for each in points
    ]


def _level(options: Mapping[str, Any]) -> str:
    return ", ".join(text.format(options[name]) for name, text in _LEVELS.items() if name in options)


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def compute_chart(data: Mapping[str, Any]) -> Chart:
    """Divergence against speed, a line for each policy."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in data["points"]:
        # The whole model's own divergence, nothing, has no place on a logarithmic axis.
        if each["divergence"] > 0 and each["speedup"] is not None:
            lines.setdefault(each["policy"], []).append((each["speedup"], each["divergence"], _level(each["options"])))
    drawn = []
    for name, points in lines.items():
        ordered = sorted(points)
        drawn.append(Line(name, tuple(point[:2] for point in ordered), tuple(point[2] for point in ordered)))
    y = "KL divergence, nats per token"
    return Chart(f"{data['model']}: less compute", "times faster", y, tuple(drawn), logarithmic=True)
