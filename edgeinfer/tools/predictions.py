"""Predictions of given tokens, alone and beside another model's, and figures of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import log_softmax
from edgeinfer.errors import ModelError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats

# Rows of logits in float64 at a time: of a vocabulary of 152k they are 20 MB, of which there are a few.
_ROWS = 16
_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

Told = Callable[[int], None]
Doubles = NDArray[np.float64]


class Predictor(Protocol):
    """What gives logits after each token of a text: a loaded `Model`, or another engine."""

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        """Arrays of a few rows each, which the next may overwrite: (R, V)."""
        ...


@dataclass(frozen=True)
class Divergence:
    """How far predictions are from a reference's, after each token of the texts.

    Attributes:
        values: Kullback-Leibler divergence from the reference's prediction, in nats. (S,)
        same: whether the most likely next token is the reference's. (S,)
        overlap: share of the reference's `top` most likely tokens that are among the model's `top`. (S,)
        reference_perplexity: of the reference on the same tokens.
    """

    values: Doubles
    same: NDArray[np.bool_]
    overlap: Doubles
    top: int
    reference_perplexity: float

    @property
    def mean(self) -> float:
        """Of the divergences, in nats."""
        return float(self.values.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean, tokens taken as independent."""
        return _standard_error(self.values)

    @property
    def agreement(self) -> float:
        """Share of tokens after which the most likely next one is the reference's."""
        return float(self.same.mean())

    def to_dict(self) -> dict[str, float | int]:
        """Figures over all tokens."""
        quantiles = np.quantile(self.values, list(_QUANTILES.values()))
        return {
            "mean": self.mean,
            "standard_error": self.error,
            **dict(zip(_QUANTILES, map(float, quantiles), strict=True)),
            "max": float(self.values.max()),
            "same_top": self.agreement,
            "same_top_standard_error": _standard_error(self.same.astype(np.float64)),
            "top": self.top,
            "top_overlap": float(self.overlap.mean()),
            "reference_perplexity": self.reference_perplexity,
        }


@dataclass(frozen=True)
class Evaluation:
    """How a model predicts texts.

    Attributes:
        logprobs: natural log-probability of each token that has others before it. (N,)
        windows: stretches of text that were read, each from an empty cache.
        divergence: from the reference; None without one.
        weight_bytes: stored bytes of all weights, scales and zero points included; None where that is not known.
        bits_per_weight: the same per parameter.
    """

    logprobs: Doubles
    windows: int
    divergence: Divergence | None = None
    weight_bytes: int | None = None
    bits_per_weight: float | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability."""
        return float(np.exp(-self.logprobs.mean()))

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity, tokens taken as independent."""
        return self.perplexity * _standard_error(self.logprobs)

    def to_dict(self) -> dict[str, Any]:
        """Figures over all tokens."""
        return {
            "perplexity": self.perplexity,
            "perplexity_standard_error": self.perplexity_error,
            "tokens": len(self.logprobs),
            "windows": self.windows,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": self.bits_per_weight,
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
        }


def read_predictions(model: Predictor, windows: Sequence[Sequence[int]], told: Told) -> Doubles:
    """Log-probability of every token of each window but its first. (N,)

    Args:
        told: called with the number of tokens that were read since the last call.
    """
    parts = []
    for ids in windows:
        start = 0
        for block in model.logits(ids):  # (R, V)
            for first in range(0, len(block), _ROWS):
                rows = log_softmax(block[first : first + _ROWS], np.float64)
                parts.append(_of_targets(rows, ids, start))
                start += len(rows)
                told(len(rows))
    return np.concatenate(parts)


def compare_predictions(
    model: Predictor, reference: Predictor, windows: Sequence[Sequence[int]], top: int, told: Told
) -> tuple[Doubles, Divergence]:
    """As `read_predictions`, and how far the predictions are from the reference's."""
    logprobs, wanted, values, same, overlap = [], [], [], [], []
    for ids in windows:
        start = 0
        for pair in _side_by_side(reference.logits(ids), model.logits(ids)):
            theirs, ours = (log_softmax(each, np.float64) for each in pair)  # (R, V)
            wanted.append(_of_targets(theirs, ids, start))
            logprobs.append(_of_targets(ours, ids, start))
            values.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
            same.append(pair[0].argmax(axis=1) == pair[1].argmax(axis=1))
            overlap.append(_overlap(*pair, top))
            start += len(ours)
            told(len(ours))
    divergence = Divergence(
        values=np.concatenate(values),
        same=np.concatenate(same),
        overlap=np.concatenate(overlap),
        top=min(top, ours.shape[1]),
        reference_perplexity=float(np.exp(-np.concatenate(wanted).mean())),
    )
    return np.concatenate(logprobs), divergence


def _side_by_side(one: Iterator[Floats], other: Iterator[Floats]) -> Iterator[tuple[Floats, Floats]]:
    """The same few rows of both, whatever arrays they come in. (R, V) each"""
    left, right = next(one), next(other)
    while True:
        if left.shape[1] != right.shape[1]:
            message = f"The models have vocabularies of {left.shape[1]} and {right.shape[1]} tokens."
            raise ModelError(message, "Compare models with the same tokenizer.")
        count = min(len(left), len(right), _ROWS)
        yield left[:count], right[:count]
        left, right = left[count:], right[count:]
        # What is left of an array is valid until the next one is asked for.
        if not len(left):
            left = next(one, left)
        if not len(right):
            right = next(other, right)
        if not len(left) or not len(right):
            return


def _of_targets(rows: Doubles, ids: Sequence[int], start: int) -> Doubles:  # (R, V) -> (R',)
    """Of the tokens that follow; the last of a window is followed by none."""
    targets = np.array(ids[start + 1 : start + 1 + len(rows)], np.int64)
    return rows[np.arange(len(targets)), targets]


def _overlap(reference: Floats, candidate: Floats, top: int) -> Doubles:  # (R, V) each -> (R,)
    top = min(top, reference.shape[1])
    best = (np.argpartition(-logits, top - 1, axis=1)[:, :top] for logits in (reference, candidate))
    shared = [len(np.intersect1d(*pair)) for pair in zip(*best, strict=True)]
    return np.array(shared, np.float64) / top


def _standard_error(values: Doubles) -> float:  # (S,)
    return float(values.std() / np.sqrt(len(values)))
