"""Size against divergence as tables and data, with the Pareto front; knows nothing of how the figures came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edgeinfer.apps.bench.quant_subjects import BundleSubject, GgufSubject, Subject

__all__ = ["Failure", "Figure", "best_within", "markdown", "pareto_front", "to_dict"]

_HEADER = ("quantization", "bits per weight", "KB", "KL divergence", "p99", "same next token", "perplexity", "front")


@dataclass(frozen=True)
class Figure:
    """What one way to make a model smaller costs.

    Attributes:
        weight_bytes: of all tensors, scales included and metadata not.
        bits_per_weight: the same per weight of the whole model.
        divergence: mean Kullback-Leibler divergence from float32, in nats; `error` is its standard error.
        agreement: share of tokens after which the same next one is most likely.
        seconds: of quantizing.
    """

    model: str
    subject: Subject
    weight_bytes: int
    bits_per_weight: float
    divergence: float
    error: float
    p99: float
    agreement: float
    perplexity: float
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A way that does not work with a model, and why."""

    model: str
    subject: Subject
    reason: str


def pareto_front(figures: Sequence[Figure]) -> list[Figure]:
    """Those to which no other is equal or better in both size and divergence, smallest first."""
    front: list[Figure] = []
    for figure in sorted(figures, key=lambda f: (f.weight_bytes, f.divergence)):
        if not front or figure.divergence < front[-1].divergence:
            front.append(figure)
    return front


def best_within(figures: Sequence[Figure], size: int) -> Figure | None:
    """The one of least divergence that takes no more bytes; None where none does."""
    return min((f for f in figures if f.weight_bytes <= size), key=lambda f: f.divergence, default=None)


def markdown(model: str, figures: Sequence[Figure], failures: Sequence[Failure], tokens: int) -> str:
    """All figures of one model by size, and ours beside each of llama.cpp's."""
    front = pareto_front(figures)
    rows = [
        (
            f"{f.subject.engine}: {f.subject.label}",
            f"{f.bits_per_weight:.3f}",
            f"{f.weight_bytes / 1000:.1f}",
            f"{f.divergence:.6f} ± {f.error:.6f}",
            f"{f.p99:.4f}",
            f"{f.agreement:.2%}",
            f"{f.perplexity:.3f}",
            "●" if f in front else "",
        )
        for f in sorted(figures, key=lambda f: f.weight_bytes)
    ]
    lines = [f"## {model}", "", *_lines(_HEADER, rows), "", f"{tokens} tokens."]
    theirs = [f for f in figures if isinstance(f.subject, GgufSubject)]
    ours = [f for f in figures if isinstance(f.subject, BundleSubject)]
    if theirs and ours:
        header = ("llama.cpp", "KB", "KL divergence", "best of ours in no more bytes", "KB", "KL divergence", "ratio")
        lines += ["", *_lines(header, [_beside(f, best_within(ours, f.weight_bytes)) for f in theirs])]
    lines += [f"- {each.subject.engine}: {each.subject.label}: {each.reason}" for each in failures]
    return "\n".join(lines) + "\n"


def to_dict(figures: Sequence[Figure], failures: Sequence[Failure]) -> dict[str, object]:
    """Everything, for JSON."""
    fronts = {f.model: pareto_front([g for g in figures if g.model == f.model]) for f in figures}
    kept = ("engine", "label")
    return {
        "figures": [
            asdict(f) | {name: getattr(f.subject, name) for name in kept} | {"front": f in fronts[f.model]}
            for f in figures
        ],
        "failures": [asdict(each) | {name: getattr(each.subject, name) for name in kept} for each in failures],
    }


def _beside(theirs: Figure, ours: Figure | None) -> tuple[str, ...]:
    known = (theirs.subject.label, f"{theirs.weight_bytes / 1000:.1f}", f"{theirs.divergence:.6f}")
    if ours is None:
        return (*known, "", "", "", "")
    ratio = f"{ours.divergence / theirs.divergence:.2f}" if theirs.divergence else ""
    return (*known, ours.subject.label, f"{ours.weight_bytes / 1000:.1f}", f"{ours.divergence:.6f}", ratio)


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
