"""Measures what quantization does to a checkpoint's predictions; knows the public face and the export command only.

python -m edgeinfer.apps.bench.quality CHECKPOINT... --text FILE [--stories 40] [--skip 0] [--json]

Every checkpoint is exported to each width in turn and scores the same text: perplexity, and how often the most likely
next token is that of the float32 export.
"""

from __future__ import annotations

import argparse
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
from edgeinfer.apps.bench.artifacts import export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.errors import EdgeInferError, UsageError

__all__ = ["Quality", "compare_widths", "main", "read_stories"]

SEPARATOR = "<|endoftext|>"
BASELINE = "32 bits"
WIDTHS: dict[str, dict[str, object]] = {
    BASELINE: {"--bits": 32},
    "8 bits": {"--bits": 8},
    "4 bits": {"--bits": 4},
    "4 bits, small layers too": {"--bits": 4, "--no-keep-small": None},
}


@dataclass(frozen=True)
class Quality:
    """One width of one model over a text.

    Attributes:
        perplexity: over all tokens but each story's first.
        change: of the perplexity against float32, as a fraction.
        agreement: share of positions whose most likely next token is float32's.
    """

    model: str
    width: str
    bits_per_weight: float
    tokens: int
    perplexity: float
    change: float
    agreement: float


@dataclass(frozen=True)
class _Scores:
    bits_per_weight: float
    logprobs: NDArray[np.float64]
    best: NDArray[np.int64]


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


def compare_widths(checkpoint: Path, stories: Sequence[str]) -> list[Quality]:
    """Exports a checkpoint to every width and scores the stories, each cut at the model's context.

    Raises:
        UsageError: the checkpoint cannot be exported.
    """
    results: list[Quality] = []
    baseline: _Scores | None = None
    for width, options in WIDTHS.items():
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / checkpoint.name
            _export(checkpoint, bundle, options)
            scores = _score(bundle, stories)
        baseline = baseline or scores
        perplexity, reference = (float(np.exp(-s.logprobs.mean())) for s in (scores, baseline))
        results.append(
            Quality(
                model=checkpoint.name,
                width=width,
                bits_per_weight=scores.bits_per_weight,
                tokens=len(scores.logprobs),
                perplexity=perplexity,
                change=perplexity / reference - 1,
                agreement=float((scores.best == baseline.best).mean()),
            )
        )
    return results


def _export(checkpoint: Path, out: Path, options: dict[str, object]) -> None:
    command = export_command(checkpoint, out, {k: v for k, v in options.items() if v is not None}, symmetric=False)
    command += [flag for flag, value in options.items() if value is None]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"{checkpoint} cannot be exported: {done.stderr.strip()}", "Export it alone to see more.")


def _score(bundle: Path, stories: Sequence[str]) -> _Scores:
    with edgeinfer.load(bundle) as model:
        begin = model.begin_ids
        logprobs, best = [], []
        for story in stories:
            ids = model.tokenize(story)
            # A story begins with the begin token; most tokenizers put it there themselves.
            ids = ids if ids[: len(begin)] == begin else begin + ids
            scores = model.score(ids[: model.context])
            logprobs.append(scores.logprobs)
            best.append(scores.best)
        return _Scores(model.info.bits_per_weight, np.concatenate(logprobs), np.concatenate(best))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = argparse.ArgumentParser(prog="quality", description="What quantization does to a model's predictions.")
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, required=True, help=f"stories separated by {SEPARATOR}")
    parser.add_argument("--stories", type=int, default=40, help="how many, from the end (default: 40)")
    parser.add_argument("--skip", type=int, default=0, help="stories left out at the end (default: 0)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        stories = read_stories(args.text, args.stories, args.skip)
        results = [quality for path in args.checkpoints for quality in compare_widths(path.resolve(), stories)]
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if args.json:
        sys.stdout.write(json.dumps([asdict(q) for q in results], indent=1) + "\n")
    else:
        sys.stdout.write(_table(results))
    return 0


def _table(results: Sequence[Quality]) -> str:
    lines = ["| model | width | bits per weight | perplexity | change | same next token |", "|---|---|---|---|---|---|"]
    for q in results:
        figures = f"{q.bits_per_weight:.2f} | {q.perplexity:.3f} | {q.change:+.2%} | {q.agreement:.2%}"
        lines.append(f"| {q.model} | {q.width} | {figures} |")
    return "\n".join(lines) + f"\n\n{results[0].tokens} to {results[-1].tokens} tokens.\n"


if __name__ == "__main__":
    sys.exit(main())
