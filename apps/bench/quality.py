"""Measures what quantization does to a checkpoint's predictions; knows the public face and the export command only.

python -m edgeinfer.apps.bench.quality CHECKPOINT... --text FILE [--stories 40] [--skip 0] [--json]
    [--widths 8,4,4small] [--group-sizes 32,64,128] [--layouts native,portable]

Every checkpoint is exported to each width in turn and reads the same text side by side with its float32 export:
perplexity, how often the most likely next token is the same, and how far the distributions are apart. With two layouts
the same weights run on our own kernel and on MatMulNBits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.apps.bench.artifacts import LAYOUTS, export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.errors import EdgeInferError, UsageError

__all__ = [
    "WIDTHS",
    "Difference",
    "Quality",
    "Variant",
    "compare_variants",
    "layout_differences",
    "main",
    "read_stories",
    "story_ids",
]

SEPARATOR = "<|endoftext|>"
BASELINE = "32 bits"
# Names for people and options of the export command.
WIDTHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "8": ("8 bits", ("--bits", "8")),
    "4": ("4 bits", ("--bits", "4")),
    "4small": ("4 bits, small layers too", ("--bits", "4", "--no-keep-small")),
    "2": ("2 bits", ("--bits", "2")),
}


@dataclass(frozen=True)
class Variant:
    """A way to export a checkpoint.

    Attributes:
        width: a key of `WIDTHS`; None is float32.
        group_size: None is the exporter's choice.
        layout: what it runs on; None is the best there is.
    """

    width: str | None
    group_size: int | None = None
    layout: str | None = None

    @property
    def scheme(self) -> str:
        """The quantization, for people; the same in every layout."""
        if self.width is None:
            return BASELINE
        groups = f", groups of {self.group_size}" if self.group_size else ""
        return WIDTHS[self.width][0] + groups

    @property
    def options(self) -> list[str]:
        """Of the export command."""
        if self.width is None:
            return ["--bits", "32"]
        group = ["--group-size", str(self.group_size)] if self.group_size else []
        return [*WIDTHS[self.width][1], "--asymmetric", *group, *["--portable"] * (self.layout == "portable")]

    @property
    def native(self) -> bool | None:
        """The option of `edgeinfer.load`."""
        return None if self.layout is None else self.layout == "native"


@dataclass(frozen=True)
class Quality:
    """One variant of one model over a text.

    Attributes:
        divergences: Kullback-Leibler divergence from float32 after each token, in nats. (S,)
        perplexity: over all tokens but each story's first.
        change: of the perplexity against float32, as a fraction.
        agreement: share of positions whose most likely next token is float32's.
    """

    model: str
    variant: Variant
    bits_per_weight: float
    divergences: NDArray[np.float64]
    perplexity: float
    change: float
    agreement: float

    @property
    def divergence(self) -> tuple[float, float]:
        """Mean of the divergences and its standard error."""
        return _mean(self.divergences)

    def to_dict(self) -> dict[str, object]:
        """All but the single divergences."""
        mean, error = self.divergence
        data = {name: value for name, value in asdict(self).items() if name not in ("divergences", "variant")}
        variant = {"scheme": self.variant.scheme, "layout": self.variant.layout}
        return data | variant | {"tokens": len(self.divergences), "divergence": mean, "divergence_error": error}


@dataclass(frozen=True)
class Difference:
    """By how much the first of two layouts diverges more from float32 than the second, with the same weights: mean over
    all tokens, and its standard error."""

    model: str
    scheme: str
    layouts: tuple[str | None, str | None]
    mean: float
    error: float


def read_stories(path: Path, count: int, skip: int = 0) -> list[str]:
    """The last `count` stories of a text file, without the `skip` that come after them.

    Raises:
        UsageError: the file has none.
    """
    stories = [s.strip() for s in path.read_text("utf-8").split(SEPARATOR) if s.strip()]
    chosen = stories[: len(stories) - skip][-count:]
    if not chosen:
        raise UsageError(f"{path} has no stories.", f"Give UTF-8 text with stories separated by {SEPARATOR}.")
    return chosen


def compare_variants(checkpoint: Path, stories: Sequence[str], variants: Sequence[Variant]) -> list[Quality]:
    """Exports a checkpoint to float32, which comes first, and to every variant, and reads the stories with each.

    Stories are cut at the model's context.

    Raises:
        UsageError: the checkpoint cannot be exported.
    """
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        _export(checkpoint, reference, Variant(None))
        results = [_compare(checkpoint.name, Variant(None), reference, reference, stories)]
        for index, variant in enumerate(variants):
            bundle = Path(folder) / str(index)
            _export(checkpoint, bundle, variant)
            results.append(_compare(checkpoint.name, variant, reference, bundle, stories))
    return results


def layout_differences(results: Sequence[Quality]) -> list[Difference]:
    """Of each two results that differ in their layout alone."""
    differences = []
    for first, second in itertools.combinations(results, 2):
        if (first.model, first.variant.scheme) == (second.model, second.variant.scheme):
            layouts = (first.variant.layout, second.variant.layout)
            mean, error = _mean(first.divergences - second.divergences)
            differences.append(Difference(first.model, first.variant.scheme, layouts, mean, error))
    return differences


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:  # (S,)
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def _export(checkpoint: Path, out: Path, variant: Variant) -> None:
    command = export_command(checkpoint, out, [*variant.options, "--no-kv-scales"])
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"{checkpoint} cannot be exported: {done.stderr.strip()}", "Export it alone to see more.")


def _compare(name: str, variant: Variant, reference: Path, bundle: Path, stories: Sequence[str]) -> Quality:
    with edgeinfer.load(reference) as theirs, edgeinfer.load(bundle, native=variant.native) as ours:
        found = edgeinfer.evaluate(ours, [story_ids(theirs, story) for story in stories], reference=theirs)
        assert found.divergence is not None
        return Quality(
            model=name,
            variant=variant,
            bits_per_weight=ours.info.bits_per_weight,
            divergences=found.divergence.values,
            perplexity=found.perplexity,
            change=found.perplexity / found.divergence.reference_perplexity - 1,
            agreement=found.divergence.agreement,
        )


def story_ids(model: edgeinfer.Model, story: str) -> list[int]:
    """A story after the begin token, which most tokenizers put there themselves, cut at the model's context."""
    begin, ids = model.begin_ids, model.tokenize(story)
    return (ids if ids[: len(begin)] == begin else begin + ids)[: model.context]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, required=True, help=f"stories separated by {SEPARATOR}")
    parser.add_argument("--stories", type=int, default=40, help="how many, from the end (default: 40)")
    parser.add_argument("--skip", type=int, default=0, help="stories left out at the end (default: 0)")
    parser.add_argument("--widths", default="8,4,4small", help=f"of {', '.join(WIDTHS)} (default: %(default)s)")
    parser.add_argument("--group-sizes", help="of 32, 64, 128 (default: the exporter's choice)")
    parser.add_argument("--layouts", help=f"of {', '.join(LAYOUTS)} (default: the best there is)")
    parser.add_argument("--json", action="store_true")
    return parser


def _variants(args: argparse.Namespace) -> list[Variant]:
    widths = args.widths.split(",")
    groups = [int(size) for size in args.group_sizes.split(",")] if args.group_sizes else [None]
    layouts = args.layouts.split(",") if args.layouts else [None]
    for name, chosen, known in (("width", widths, [*WIDTHS]), ("layout", layouts, [*LAYOUTS, None])):
        for unknown in set(chosen) - set(known):
            raise UsageError(f"There is no {name} {unknown!r}.", f"Choose of {', '.join(str(k) for k in known if k)}.")
    return [Variant(*each) for each in itertools.product(widths, groups, layouts)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        stories, variants = read_stories(args.text, args.stories, args.skip), _variants(args)
        results = [q for path in args.checkpoints for q in compare_variants(path.resolve(), stories, variants)]
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    differences = layout_differences(results)
    if args.json:
        found = {"results": [q.to_dict() for q in results], "layouts": [asdict(each) for each in differences]}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(_table(results, differences))
    return 0


def _table(results: Sequence[Quality], differences: Sequence[Difference]) -> str:
    header = "model | weights | layout | bits per weight | perplexity | change | same next token | KL divergence, nats"
    lines = [f"| {header} |", "|" + "---|" * 8]
    for q in results:
        mean, error = q.divergence
        figures = f"{q.bits_per_weight:.2f} | {q.perplexity:.3f} | {q.change:+.2%} | {q.agreement:.2%}"
        lines.append(
            f"| {q.model} | {q.variant.scheme} | {q.variant.layout or ''} | {figures} | {mean:.6f} ± {error:.6f} |"
        )
    lines.append(f"\n{len(results[0].divergences)} to {len(results[-1].divergences)} tokens.")
    for d in differences:
        lines.append(f"{d.model}, {d.scheme}: {d.layouts[0]} - {d.layouts[1]} = {d.mean:+.6f} ± {d.error:.6f} nats")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
