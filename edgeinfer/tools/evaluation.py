"""How well a model predicts given texts, alone or compared with a reference, and what smaller KV caches change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import ModelError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.types import LoadDictButContext
from edgeinfer.core.records import dataclass
from edgeinfer.loading import located
from edgeinfer.model import Model
from edgeinfer.nn.arithmetic import log_softmax
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.text.vocabularies import vocabulary_difference

# Rows of logits in float64 at a time: of a vocabulary of 152k they are 20 MB, of which there are a few.
_ROWS = 16
_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

Report = Callable[[int], None]
Doubles = NDArray[np.float64]


class Predictor(Protocol):
    """Gives logits after each token of a text: a loaded `Model`, or another engine."""

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
        """Mean divergence, in nats."""
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


def read_predictions(model: Predictor, windows: Sequence[Sequence[int]], report: Report) -> Doubles:
    """Log-probability of every token of each window but its first; reports the tokens read since the last call. (N,)"""
    parts = []
    for ids in windows:
        start = 0
        for block in model.logits(ids):  # (R, V)
            for first in range(0, len(block), _ROWS):
                rows = log_softmax(block[first : first + _ROWS], np.float64)
                parts.append(_of_targets(rows, ids, start))
                start += len(rows)
                report(len(rows))
    return np.concatenate(parts)


def compare_predictions(
    model: Predictor, reference: Predictor, windows: Sequence[Sequence[int]], top: int, report: Report
) -> tuple[Doubles, Divergence]:
    """Log-probabilities as `read_predictions` gives them, and the divergence from the reference's predictions."""
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
            report(len(ours))
    divergence = Divergence(
        values=np.concatenate(values),
        same=np.concatenate(same),
        overlap=np.concatenate(overlap),
        top=min(top, ours.shape[1]),
        reference_perplexity=float(np.exp(-np.concatenate(wanted).mean())),
    )
    return np.concatenate(logprobs), divergence


def _side_by_side(one: Iterator[Floats], other: Iterator[Floats]) -> Iterator[tuple[Floats, Floats]]:
    """Equally many rows of both at a time, whatever arrays they come in. (R, V) each"""
    left, right = next(one), next(other)
    while True:
        if left.shape[1] != right.shape[1]:
            message = f"The models have vocabularies of {left.shape[1]} and {right.shape[1]} tokens."
            raise ModelError(message, "Compare models with the same tokenizer.")
        count = min(len(left), len(right), _ROWS)
        yield left[:count], right[:count]
        left, right = left[count:], right[count:]
        # The rest of an array is valid until the next one is asked for.
        if not len(left):
            left = next(one, left)
        if not len(right):
            right = next(other, right)
        if not len(left) or not len(right):
            return


def _of_targets(rows: Doubles, ids: Sequence[int], start: int) -> Doubles:  # (R, V) -> (R',)
    """The values of the next tokens; the last token of a window has none."""
    targets = np.array(ids[start + 1 : start + 1 + len(rows)], np.int64)
    return rows[np.arange(len(targets)), targets]


def _overlap(reference: Floats, candidate: Floats, top: int) -> Doubles:  # (R, V) each -> (R,)
    top = min(top, reference.shape[1])
    best = (np.argpartition(-logits, top - 1, axis=1)[:, :top] for logits in (reference, candidate))
    shared = [len(np.intersect1d(*pair)) for pair in zip(*best, strict=True)]
    return np.array(shared, np.float64) / top


def _standard_error(values: Doubles) -> float:  # (S,)
    return float(values.std() / np.sqrt(len(values)))


# Windows are this long where the models hold more: longer ones say little more about the weights.
_LONGEST = 2048


def evaluate(
    model: str | Path | Predictor | None,
    texts: Sequence[str] | Sequence[Sequence[int]],
    *,
    reference: str | Path | Predictor | None = None,
    context: int | None = None,
    tokens: int | None = None,
    top: int = 10,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Unpack[LoadDictButContext],
) -> Evaluation:
    """Measures how well a model predicts texts, and how far it is from a reference.

    Args:
        model: a bundle directory or hub id, None for the built-in model; or a loaded model.
        texts: read in windows, each after the begin token if the tokenizer adds one; or token ids, each text one window
            as it is.
        reference: the model to compare predictions with, usually the same one unquantized; as `model`.
        context: tokens of a window; None is the models' longest, at most 2048.
        tokens: most to read in all.
        top: most likely tokens whose overlap is counted.
        progress: called with a stage, tokens read and tokens to read.
        options: of `load` for `model`; the reference takes the defaults.

    Raises:
        ModelError: as `edgeinfer.load`; or the tokens of the two models are not the same.
        UsageError: an option is out of range, or there is no text.
    """
    if top < 1 or (tokens is not None and tokens < 2) or (context is not None and context < 2):
        raise UsageError(
            "There is nothing to measure.", "Use a top of at least 1, and tokens and context of at least 2."
        )
    bundle = _bundle(model, options)
    compared = None if reference is None else _bundle(reference, {})
    if bundle is not None and compared is not None and (difference := vocabulary_difference(bundle, compared)):
        message = f"{bundle.manifest.name} cannot be compared with {compared.manifest.name}: {difference}."
        raise ModelError(message, "Choose a reference with the same tokenizer, such as the model unquantized.")
    length = context or min([_LONGEST, *(each.manifest.geometry.max_positions for each in (bundle, compared) if each)])
    plain: dict[str, Any] = {"context": length, "speculation": "off", "remember": False}
    with ExitStack() as opened:
        ours = _loaded(opened, model, bundle, {**plain, **options})
        windows = _first(_windows(ours, texts, length), tokens)
        if not windows:
            raise UsageError("There is no text to read.", "Use a text of at least two tokens.")
        report = _counter(progress, sum(map(len, windows)))
        divergence = None
        if reference is None:
            logprobs = read_predictions(ours, windows, report)
        else:
            theirs = _loaded(opened, reference, compared, plain)
            logprobs, divergence = compare_predictions(ours, theirs, windows, top, report)
    if bundle is None or not bundle.manifest.tensors:
        return Evaluation(logprobs, len(windows), divergence)
    manifest = bundle.manifest
    return Evaluation(logprobs, len(windows), divergence, manifest.weight_bytes, manifest.bits_per_weight)


def _bundle(model: str | Path | Predictor | None, options: Mapping[str, Any]) -> Bundle | None:
    """The bundle to load; None for a loaded model."""
    if not (model is None or isinstance(model, str | Path)):
        return None
    return open_bundle(located(model, LoadOptions.of(**options)))


def _loaded(
    opened: ExitStack, model: str | Path | Predictor | None, bundle: Bundle | None, options: dict[str, Any]
) -> Predictor:
    if bundle is not None:
        assert model is None or isinstance(model, str | Path), "only what is not loaded has one"
        return opened.enter_context(load(model, **options))
    assert model is not None and not isinstance(model, str | Path), "only what is loaded has no bundle"
    return model


def _windows(model: Predictor, texts: Sequence[str] | Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Token ids of every window that has a token to predict."""
    windows: list[list[int]] = []
    for text in texts:
        if not isinstance(text, str):
            windows.append(list(text))
            continue
        if not isinstance(model, Model):
            raise UsageError("Only edgeinfer's own models take text.", "Give token ids.")
        if text:
            windows += _cut(model.tokenize(text, parse_special=False), model.prefix_ids, min(length, model.context))
    return [ids for ids in windows if len(ids) > 1]


def _cut(ids: list[int], begin: list[int], length: int) -> list[list[int]]:
    """A text in windows, each after what the tokenizer puts before the first."""
    ids = ids[len(begin) :]
    step = length - len(begin)
    return [begin + ids[start : start + step] for start in range(0, len(ids), step)]


def _first(windows: list[list[int]], tokens: int | None) -> list[list[int]]:
    """The windows up to so many tokens, the last one shortened."""
    if tokens is None:
        return windows
    kept: list[list[int]] = []
    for ids in windows:
        ids = ids[:tokens]
        if len(ids) < 2:
            break
        kept.append(ids)
        tokens -= len(ids)
    return kept


def _counter(progress: Callable[[str, int, int], None] | None, total: int) -> Callable[[int], None]:
    done = 0

    def report(read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress("reading", done, total)

    return report
