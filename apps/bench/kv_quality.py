"""Measures what quantized KV caches do to a model's predictions; knows the public face only.

python -m edgeinfer.apps.bench.kv_quality [BUNDLE...] --text FILE [--stories 40] [--skip 0] [--json]

Every model, the built-in one without BUNDLE, reads the same stories with each type of cache. Perplexity and how often
the most likely next token is that of the float32 cache; of a passage given twice, how many tokens of the second time
are foreseen; and how far each layer's attention is from that over a float32 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.apps.bench.texts import SEPARATOR, read_stories
from edgeinfer.config import ONNX_KV_TYPES
from edgeinfer.errors import EdgeInferError, UsageError

__all__ = ["KVQuality", "compare_caches", "main"]

# Tokens of a repeated passage that are given before the model has to foresee the rest of it.
_HINT = 8


@dataclass(frozen=True)
class KVQuality:
    """One model with one type of cache.

    Attributes:
        change: of the perplexity against the float32 cache.
        agreement: share of positions with the same most likely next token as with the float32 cache.
        copied: share of a repeated passage's tokens that are the most likely ones.
        attention_error: root mean square over layers of the relative error of attention's output.
        worst_layer: the largest of these errors.
    """

    model: str
    kv: str
    perplexity: float
    change: float
    agreement: float
    copied: float
    attention_error: float
    worst_layer: float
    tokens: int
    copied_tokens: int


@dataclass(frozen=True)
class _Reading:
    """What one type of cache gives: log-probability and most likely token at each place that has a next one."""

    logprobs: NDArray[np.float64]  # (N,)
    best: NDArray[np.int64]  # (N,)
    copies: NDArray[np.bool_]  # (C,), whether the most likely token was the passage's


def compare_caches(model: str | None, stories: Sequence[str]) -> list[KVQuality]:
    """Reads the stories with every type of cache, float32 first.

    Raises:
        UsageError, ModelError: the model has no graphs or no scales for quantized caches, or cannot be loaded.
    """
    errors = {error.kv: error for error in edgeinfer.measure_kv(model, stories)}
    readings = {kv: _read(model, kv, stories) for kv in ONNX_KV_TYPES if kv == ONNX_KV_TYPES[0] or kv in errors}
    name = "tales" if model is None else Path(model).name
    base, results = readings[ONNX_KV_TYPES[0]], []
    for kv, reading in readings.items():
        perplexity, plain = (float(np.exp(-each.logprobs.mean())) for each in (reading, base))
        result = KVQuality(
            model=name,
            kv=kv,
            perplexity=perplexity,
            change=perplexity / plain - 1,
            agreement=float((reading.best == base.best).mean()),
            copied=float(reading.copies.mean()),
            attention_error=errors[kv].mean if kv in errors else 0.0,
            worst_layer=max(errors[kv].layers) if kv in errors else 0.0,
            tokens=len(reading.best),
            copied_tokens=len(reading.copies),
        )
        results.append(result)
    return results


def _read(model: str | None, kv: str, stories: Sequence[str]) -> _Reading:
    logprobs, best, copies = [], [], []
    with edgeinfer.load(model, kv=kv, speculation="off") as loaded:
        begin = loaded.begin_ids
        for story in stories:
            ids = loaded.tokenize(story, parse_special=False)
            ids = ids if ids[: len(begin)] == begin else begin + ids
            told = ids[: loaded.context]
            chances, likely = _predict(loaded, told)
            logprobs.append(chances)
            best.append(likely)
            passage = ids[len(begin) : len(begin) + (loaded.context - len(begin)) // 2]
            _, likely = _predict(loaded, [*begin, *passage, *passage])
            second = len(begin) + len(passage) + _HINT
            copies.append(likely[second - 1 :] == np.array(passage[_HINT:]))
    return _Reading(*(np.concatenate(parts) for parts in (logprobs, best, copies)))


def _predict(model: edgeinfer.Model, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Of every token but the first: its log-probability, and the token that was most likely in its place."""
    chances, likely, start = [], [], 0
    for logits in model.logits(ids):  # (R, V)
        targets = np.array(ids[start + 1 : start + 1 + len(logits)], np.int64)
        rows = logits[: len(targets)].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        chances.append(rows[np.arange(len(targets)), targets] - np.log(np.exp(rows).sum(axis=1)))
        likely.append(rows.argmax(axis=1))
        start += len(logits)
    return np.concatenate(chances), np.concatenate(likely)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.kv_quality", description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="*", metavar="BUNDLE")
    parser.add_argument("--text", type=Path, required=True, help=f"stories separated by {SEPARATOR}")
    parser.add_argument("--stories", type=int, default=40, help="how many, from the end (default: 40)")
    parser.add_argument("--skip", type=int, default=0, help="stories left out at the end (default: 0)")
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        if args.stories < 1 or args.skip < 0:
            raise UsageError("There must be at least one story.", "Give --stories 1 or more, --skip 0 or more.")
        stories = read_stories(args.text, args.stories, args.skip)
        results = [q for bundle in args.bundles or [None] for q in compare_caches(bundle, stories)]
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    shown = json.dumps([asdict(q) for q in results], indent=1) + "\n" if args.json else _table(results)
    sys.stdout.write(shown)
    return 0


def _table(results: Sequence[KVQuality]) -> str:
    header = "model | cache | perplexity | change | same next token | copied | attention error | worst layer"
    lines = [f"| {header} |", "|" + "---|" * 8]
    for q in results:
        shares = f"{q.change:+.3%} | {q.agreement:.2%} | {q.copied:.2%} | {q.attention_error:.2%} | {q.worst_layer:.2%}"
        lines.append(f"| {q.model} | {q.kv} | {q.perplexity:.4f} | {shares} |")
    lines.append(f"\n{results[0].tokens} tokens, {results[0].copied_tokens} of them copied.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
