"""How unsure a model is before it is wrong, learnt from a text (AdaDec, arXiv 2506.08980)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.option_types import LoadOptions
from edgeinfer.runtime.profile.uncertainty import KEPT_UNCERTAINTY, MeasuredUncertainty
from edgeinfer.tools.evaluation import Predictor

# Tokens of a text that are read, and of one piece of it.
_MOST, _PIECE = 8192, 1024
_FEWEST = 64
_STEPS = 50
# Keeps the fit finite where one entropy parts right from wrong; far below what a text tells.
_RIDGE = 1e-6

Doubles = NDArray[np.float64]


def tune_uncertainty(
    model: str | Path | None,
    text: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadOptions],
) -> MeasuredUncertainty:
    """Learns above which entropy the likeliest token is rather wrong than right; "lookahead" takes it.

    Each token of the text is right where the model thought it the likeliest. A logistic regression tells the chance of
    an error by the entropy before it, right and wrong tokens weighing the same; the threshold is where it is even.

    Args:
        model: bundle directory, GGUF file or hub id; None is the built-in model.
        text: of what the model is used for; up to 8,192 tokens are read.
        progress: called with tokens read and to read.
        options: as `load` takes them.

    Raises:
        UsageError: the text is too short, or tells nothing of when the model is wrong.
        ModelError: as `load`.
        StorageError: the result cannot be kept.
    """
    bundle = open_bundle(resolve(model))
    given: dict[str, Any] = {"speculation": "off", "remember": False, **options}
    with load(model, **given) as loaded:
        ids, begin = loaded.tokenize(text, parse_special=False)[:_MOST], loaded.prefix_ids
        if len(ids) < _FEWEST:
            message = f"{len(ids)} tokens are too few to learn from."
            raise UsageError(message, f"Give a text of at least {_FEWEST} tokens.")
        size = min(_PIECE, loaded.context - len(begin))
        read = []
        for start in range(0, len(ids), size):
            if progress is not None:
                progress(start, len(ids))
            read.append(_entropies(loaded, [*begin, *ids[start : start + size]]))
    entropies, wrong = (np.concatenate(each) for each in zip(*read, strict=True))
    threshold = _even_chance(entropies, wrong.astype(np.bool_))
    measured = MeasuredUncertainty(
        threshold, len(entropies), float(wrong.mean()), float((entropies > threshold).mean())
    )
    KEPT_UNCERTAINTY.keep(bundle, measured)
    return measured


def _entropies(model: Predictor, ids: list[int]) -> tuple[Doubles, Doubles]:  # (S - 1,), (S - 1,)
    """Entropies in nats before all tokens but the first, and whether each was not the likeliest."""
    found, wrong, after = [], [], np.array(ids[1:])
    start = 0
    for logits in model.logits(ids):  # (R, V)
        targets = after[start : start + len(logits)]
        for row, target in zip(logits[: len(targets)].astype(np.float64), targets, strict=True):
            row -= row.max()
            weights = np.exp(row)
            total = weights.sum()
            found.append(np.log(total) - float(weights @ row) / total)
            wrong.append(row[target] < 0)
        start += len(logits)
    return np.array(found), np.array(wrong, np.float64)


def _even_chance(entropies: Doubles, wrong: NDArray[np.bool_]) -> float:  # (S,), (S,)
    """The entropy at which a logistic regression finds an error as likely as none, both kinds weighing the same."""
    hint = "Give a longer text, of what the model is used for."
    if wrong.all() or not wrong.any():
        raise UsageError(f"The model is {'always' if wrong.any() else 'never'} wrong about this text.", hint)
    chosen = fit_logistic(np.stack([entropies, np.ones(len(entropies))], axis=1), wrong, _RIDGE)
    threshold = -chosen[1] / chosen[0] if chosen[0] > 0 else -1.0
    if threshold < 0:
        raise UsageError("This text does not tell when the model is wrong.", hint)
    return float(threshold)


def fit_logistic(inputs: Doubles, wrong: NDArray[np.bool_], ridge: float) -> Doubles:  # (S, K), (S,) -> (K,)
    """Coefficients by which inputs tell the log-odds of what is wrong, right and wrong weighing the same."""
    weights = np.where(wrong, 0.5 / wrong.sum(), 0.5 / (~wrong).sum())
    chosen = np.zeros(inputs.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ chosen, -30, 30)))
        slope = inputs.T @ (weights * (wrong - chance)) - ridge * chosen
        bend = (inputs.T * (weights * chance * (1 - chance))) @ inputs + ridge * np.eye(len(chosen))
        step = np.linalg.solve(bend, slope)
        chosen += step
        if np.abs(step).max() < 1e-9:
            break
    return chosen
