"""The bundles that memory is measured on: the built-in one and random ones of several sizes; knows nothing of plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.apps.bench.model_files import LAYOUTS, Artifacts, BundleKind
from edgeinfer.apps.bench.synthetic import find_shape

__all__ = ["SIZES", "Subject", "find_subjects"]

SIZES = ("tiny", "15m", "60m", "qwen2.5-0.5b")
# A draft model as large as its target is slow; beyond this it is not worth a benchmark's time.
_LARGEST_DRAFTER = 70e6


@dataclass(frozen=True)
class Subject:
    """A bundle that plans are drawn for.

    Attributes:
        model: its folder.
        longest: tokens it can hold.
        vocabulary: tokens of its tokenizer; the random ones have the same if they have as many.
        mates: bundles that could draft for it, itself perhaps.
    """

    name: str
    model: str
    parameters: int
    longest: int
    vocabulary: str
    mates: tuple[str, ...] = ()


def find_subjects(
    built_in: Path, work: Path, shapes: Sequence[str] = SIZES, told: Callable[[int, int], None] | None = None
) -> list[Subject]:
    """The built-in model, and a native and a portable bundle of each shape, which are made where they are missing.

    Args:
        built_in: the folder of the built-in bundle.
        work: where the others are kept.
        told: called with the bundles done and their number.

    Raises:
        UsageError: an unknown shape.
        BackendError: a bundle could not be made.
    """
    manifest = json.loads((built_in / "edgeinfer.json").read_text("utf-8"))
    longest = int(manifest["geometry"]["max_positions"])
    found = [Subject("built-in", str(built_in), int(manifest["parameters"]), longest, "built-in")]
    found += _random(work, shapes, told)
    return [replace(subject, mates=_mates(subject, found)) for subject in found]


def _random(work: Path, shapes: Sequence[str], told: Callable[[int, int], None] | None) -> Iterator[Subject]:
    for number, name in enumerate(shapes):
        shape = find_shape(name)
        artifacts = Artifacts(work, shape)
        for turn, layout in enumerate(LAYOUTS):
            if told:
                told(number * len(LAYOUTS) + turn, len(shapes) * len(LAYOUTS))
            bundle = artifacts.bundle(BundleKind(layout))
            entries = str(shape.vocab_entries)
            yield Subject(f"{name} {layout}", str(bundle), shape.parameters, shape.max_position, entries)


def _mates(subject: Subject, others: Sequence[Subject]) -> tuple[str, ...]:
    return tuple(
        other.model
        for other in others
        if other.vocabulary == subject.vocabulary and other.parameters <= min(subject.parameters, _LARGEST_DRAFTER)
    )
